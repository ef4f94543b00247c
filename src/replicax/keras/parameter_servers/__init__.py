"""Keras models whose variables are on parameter servers.

Keras keeps its loops, callbacks and data adapters on the coordinator. A step is a closure: a
worker builds the model from its configuration once (`worker_model`), computes gradients and
metrics in one compiled program (`steps`), and pushes the gradients to the servers, which run the
optimizer (`optimizer`). The coordinator adds up what the steps return (`trainer`).
"""
