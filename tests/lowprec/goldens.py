"""Golden values: measured on TransformerEngine's and torchao's own functions, or taken from the formats' specifications."""

# biased E8M0 byte of a block whose amax is the key: floor, rceil, ceil, even (torchao's four modes, E4M3 elements)
MX_BYTES = {448.0: (127, 127, 128, 127), 480.0: (127, 128, 128, 127)}

# TransformerEngine's byte for edge cases
TE_BYTES = {0.0: 0x00, float("inf"): 0xFE, float("nan"): 0xFF}

# every midpoint between two E2M1 values, ties to even
E2M1_TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
# DeepGEMM sends ties down
E2M1_TIES_DEEPGEMM = {0.25: 0.0, 0.75: 0.5, 1.25: 1.0, 1.75: 1.5, 2.5: 2.0, 3.5: 3.0, 5.0: 4.0}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# largest finite and smallest positive value
RANGES = {"e4m3": (448.0, 2.0**-9), "e5m2": (57344.0, 2.0**-16), "e2m1": (6.0, 0.5)}

# Philox4x32-10 known answers of Random123: counter, key, output
PHILOX = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
