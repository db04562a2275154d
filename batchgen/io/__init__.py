"""Files, sources and sinks."""
