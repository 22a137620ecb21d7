"""The only modules that import vLLM: the plugin that vLLM loads, and its layerwise reload."""
