#pragma once
#include <cstdint>

// At least `bytes` of memory of the calling thread, aligned to a page; its last contents are lost. NULL where there is none.
char* sa_scratch(int64_t bytes);

// Lets other threads have the processor.
void sa_yield();
