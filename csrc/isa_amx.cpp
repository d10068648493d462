#define QUIRE_ISA_NAME "amx"
#include "kernel_table.inl"
