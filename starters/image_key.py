"""Build the content hash of m6: what makes two pictures the same one.

A picture in a prompt is a range of equal placeholders, so token ids cannot tell two pictures apart. Each picture
therefore has a name that is computed from its content. The prefix cache numbers the names and writes the number into
its key, in place of every placeholder; the cache of embeddings finds a picture by its name alone. Two pictures with one
name are one picture for both: the later request gets an answer about the earlier picture. And a picture whose name
changes is computed again each time.

Explained in docs/m6_multimodal_pd.md#multimodalinputs-the-content-of-a-picture-in-the-caches-key.

    cp starters/image_key.py my_hash.py
    pytest --part image_key=my_hash.py:my_content_hash
"""

import numpy as np

from m6_multimodal_pd.multimodal.inputs import Grid, Modality


def my_content_hash(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """Return the sha256, as 64 hex digits, of everything that the embeddings of a picture depend on.

    Two calls return the same text if and only if all of these are the same:

    - `modality`: an image or a video (`modality.value` is a text).
    - `feature`: its type, its shape `[patches, patch_dim]`, and all of its values, row by row.
    - `grid_thw`: the number of patches along time, height and width, three whole numbers of any size.
    - `options`: the settings of the processor that made the feature, any bytes of any length, also none.

    A hash function reads one row of bytes, so the parts are written one after the other. It must be visible where each
    of them ends.

    The values of `feature` need not lie side by side in memory: it may be every second column of an array, an array in
    Fortran's order, or a transposed one. It may be read-only, and it may be large. It is not changed.

    The result is the same in every process, and for every object with the same values.
    """
    raise NotImplementedError
