"""NaN and infinity in weights: the files of a run that has diverged load, but such a model is useless."""

CACHED_BYTES = 1 << 17
NOT_FINITE = {
    **{"F64": ("<u8", 0x7FF0000000000000), "F32": ("<u4", 0x7F800000), "C64": ("<u4", 0x7F800000)},
    **{"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)},
}
"""The bits of a number of each dtype, and those that are all set in NaN and infinity."""


def count(content: memoryview, dtype: str) -> int:
    import numpy as np

    if dtype not in NOT_FINITE:
        return 0
    kind, mask = NOT_FINITE[dtype]
    bits = np.frombuffer(content, kind)
    step, odd = CACHED_BYTES // bits.itemsize, 0
    for start in range(0, bits.size, step):
        exponents = bits[start : start + step] & bits.dtype.type(mask)
        if exponents.max() == mask:
            odd += int((exponents == mask).sum())
    return odd
