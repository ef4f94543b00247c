"""Where the tasks of a cluster are found, in each environment."""
