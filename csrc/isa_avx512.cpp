#define QUIRE_ISA_NAME "avx512"
#include "kernel_table.inl"
