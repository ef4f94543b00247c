"""Names for the kinds of arguments that TensorFlow's functions take, and that types cannot say."""

from typing import Any, TypeAlias

# A tensor, variable, array, number or text, or a structure of them.
Value: TypeAlias = Any
# A variable of replicax or of Keras, which may not be imported.
VariableLike: TypeAlias = Any
# A `tf.DType`, a NumPy dtype, or the name of one.
DTypeLike: TypeAlias = Any
# A `tf.TensorShape`, a sequence of sizes, a size, or None.
ShapeLike: TypeAlias = Any
# An argument that is accepted for portability, without effect.
Ignored: TypeAlias = Any
# A list, tuple or dict of values and of further structures, or one value.
Structure: TypeAlias = Any
# A path as text, bytes, `os.PathLike`, or a tensor of one.
PathValue: TypeAlias = Any
# A number, or a tensor of one.
Number: TypeAlias = Any
# An object of Keras, which is imported when it is first used.
KerasObject: TypeAlias = Any
# A dataset of tf.data or rx.data, or one of its iterators.
AnyDataset: TypeAlias = Any
