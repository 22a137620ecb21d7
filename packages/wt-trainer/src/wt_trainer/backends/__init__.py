"""Built-in backends, one module per protocol; the worker's package has a module of the same name for each."""
