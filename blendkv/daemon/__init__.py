"""The store as a process of its own: `Daemon` serves it, `DaemonStore` is a client's door to it.

Messages are small and typed (`blendkv.daemon.messages`); chunk KVs never pass through the socket: they lie in sealed
shared memory whose descriptors are handed over. Nothing here needs torch, but what gives an engine its tensors.
"""
