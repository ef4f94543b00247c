"""Datasets for people who come from tf.data: a thin layer over Grain."""
