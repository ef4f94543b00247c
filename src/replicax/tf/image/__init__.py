"""`tf.image`: resizing, cropping, colours, boxes and measures of images."""

from replicax.tf import namespaces as _namespaces

_TABLE = _namespaces.Table(
    modules=(
        ".image.resizing",
        ".image.flips",
        ".image.colors",
        ".image.adjustments",
        ".image.crops",
        ".image.patches",
        ".image.suppression",
        ".image.boxes",
        ".image.distorted_boxes",
        ".image.quality",
        ".image.files",
        ".io.images",
    )
)

__getattr__, __dir__ = _namespaces.lookup("image", _TABLE, globals())
