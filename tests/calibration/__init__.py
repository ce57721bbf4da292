"""How often the verdicts are right: recorded runs of a real checkpoint and simulations."""
