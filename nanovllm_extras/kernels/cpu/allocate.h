// Memory that a function needs during a call. Every allocation is checked: a function that gets no memory returns
// NO_MEMORY, and library.py raises MemoryError.
//
// Buffers of a thread are here and not on its stack, which may have only 128 KiB (ulimit -s). The memory for all threads
// is allocated before a loop (team.h), which no thread could leave early.

#pragma once
#include <stdlib.h>

enum status { DONE, ABORTED, NO_MEMORY };  // ABORTED: see ranks.h

// Return memory at the start of a cache line, or NULL. The caller frees it.
static inline void *allocate(size_t num_bytes) { return aligned_alloc(64, (num_bytes / 64 + 1) * 64); }
