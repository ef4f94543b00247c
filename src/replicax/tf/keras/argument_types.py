"""Types of arguments that pass through to Keras, which checks them itself."""

from __future__ import annotations

from typing import Any, TypeAlias

# A tensor, a variable, an array, a number, or a structure of them.
Value: TypeAlias = Any
# A model with the attributes of this version of Keras.
KerasModel: TypeAlias = Any
# An object of Keras, or of a user, that Keras calls.
KerasObject: TypeAlias = Any
# A path as text or object, local or remote.
FilePath: TypeAlias = Any
# A type of elements, by name or as an object.
ElementType: TypeAlias = Any
