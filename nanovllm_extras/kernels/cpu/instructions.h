// Describe what a library was compiled for. library.py calls these functions.

#pragma once
#include "vectors.h"
#include "vnni.h"

long element_bytes(void) { return sizeof(element); }

const char *instructions(void) {
#if defined HAS_TILES && defined AMX
    return "AMX BF16";
#elif defined HAS_TILES
    return "AMX BF16, emulated";
#elif defined __AVX512BF16__ && defined BFLOAT16
    return "AVX-512 BF16";
#elif defined __AVX512F__
    return "AVX-512";
#elif defined HAS_VNNI
    return "AVX2 VNNI";
#elif defined __AVX2__
    return "AVX2";
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC && defined BFLOAT16
    return "NEON BF16";
#elif defined __ARM_NEON
    return "NEON";
#else
    return "generic";
#endif
}
