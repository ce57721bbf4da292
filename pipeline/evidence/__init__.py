"""Evidence: paired statistics, verdicts against margins, the policy and the gate. Pure."""
