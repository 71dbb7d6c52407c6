"""Typical mistakes in a content hash, each with the hint that it must get."""

import hashlib

import numpy as np

from m6_multimodal_pd.multimodal.inputs import Grid, Modality


def sha(*parts: str | bytes) -> str:
    """The sha256 of parts that cannot be taken for each other."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def of_the_bytes(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """The shape is forgotten."""
    return sha(modality.value, feature.dtype.name, options, feature.tobytes())


def of_the_feature(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """The feature has a shape of its own, but that is not the grid."""
    return sha(modality.value, feature.dtype.name, str(feature.shape), options, feature.tobytes())


def of_any_type(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """The type of the values is forgotten."""
    return sha(modality.value, str(feature.shape), str(grid_thw), options, feature.tobytes())


def of_the_picture(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """The settings of the processor are no part of the picture, and yet of its embeddings."""
    return sha(modality.value, feature.dtype.name, str(feature.shape), str(grid_thw), feature.tobytes())


def of_the_text(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """numpy shortens the text of a large array."""
    return sha(repr((modality, feature.dtype, feature.shape, grid_thw, options)), repr(feature))


def without_ends(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """Numbers are written one after the other, without anything between them."""
    digits = "".join(map(str, grid_thw))
    return sha(modality.value, feature.dtype.name, str(feature.shape), digits, options, feature.tobytes())


def as_it_lies_in_memory(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """Fortran's order is left as it is."""
    data = feature.tobytes(order="A")
    return sha(modality.value, feature.dtype.name, str(feature.shape), str(grid_thw), options, data)


def of_python(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """Python's hash of bytes is another one in each process."""
    data = feature.tobytes()
    return sha(str(hash((modality.value, feature.dtype.name, feature.shape, tuple(grid_thw), options, data))))


WRONG = [
    (of_the_bytes, "3 x 4 patches are not 4 x 3"),
    (of_the_feature, "3 x 4 patches are not 4 x 3"),
    (of_any_type, "says which values they are"),
    (of_the_picture, "`options` belongs to the content"),
    (of_the_text, "Hash its bytes"),
    (without_ends, "Something must stand between them"),
    (as_it_lies_in_memory, "side by side, row by row, first"),
    (of_python, "is another one in each process"),
]
