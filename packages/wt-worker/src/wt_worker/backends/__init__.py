"""Built-in backends, one module per protocol; the trainer's package has a module of the same name for each."""
