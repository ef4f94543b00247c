"""`replicax doctor`: checks what a job needs from its host, and says what to do.

findings              the result of a check, and how checks are run in bounded time
installation          versions, extras and devices
cluster               the resolver, the keys, the own port, and the peers
host                  clocks, limits, memory and the runtime directory
checkpoint_directory  space, speed and clock of the directory of checkpoints
"""
