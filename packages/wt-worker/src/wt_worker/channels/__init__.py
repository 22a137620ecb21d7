"""How bytes move. A channel knows nothing of rounds, parameters or models."""
