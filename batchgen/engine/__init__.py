"""The engine: scheduler, KV blocks, sampler and the runner that owns the device."""
