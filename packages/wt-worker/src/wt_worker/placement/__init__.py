"""Where the bytes of a checkpoint land in a model: traced from its loader once, then written there without it."""
