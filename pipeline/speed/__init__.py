"""How speed is measured: loads, prompts, the steady window, drift, the machine's state, and what each metric means."""
