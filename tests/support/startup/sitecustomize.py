"""Imported by every Python process that has this directory in PYTHONPATH, when it starts."""

import os

import ignored_exceptions

if path := os.environ.get(ignored_exceptions.VARIABLE):
    ignored_exceptions.install(path)
