"""Names of `tf.compat.v1` whose arguments or meaning differ from those of version 2."""
