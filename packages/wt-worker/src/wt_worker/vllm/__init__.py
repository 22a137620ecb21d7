"""The only modules that import vLLM: the plugin that it loads, and installing by its own loaders."""
