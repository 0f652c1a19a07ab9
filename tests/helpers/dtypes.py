"""The element types that a checkpoint stores, as docs/dtypes.md lists them."""

import ml_dtypes  # noqa: F401  makes numpy know the names

STORED_AS_IS = """
    bfloat16 bool complex128 complex64 float16 float32 float4_e2m1fn float64 float8_e3m4
    float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu int16 int2 int32 int4 int64 int8 uint16 uint32 uint64 uint8
"""
STORED_AS_BYTES = "float6_e2m3fn float6_e3m2fn float8_e4m3 int1 uint1 uint2 uint4"
ALL = sorted(f"{STORED_AS_IS} {STORED_AS_BYTES}".split())
