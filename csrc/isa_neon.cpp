#define QUIRE_ISA_NAME "neon"
#include "kernel_table.inl"
