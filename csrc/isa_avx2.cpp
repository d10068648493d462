#define QUIRE_ISA_NAME "avx2"
#include "kernel_table.inl"
