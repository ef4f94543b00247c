"""Which tasks form a cluster, what they are called, and where they listen."""
