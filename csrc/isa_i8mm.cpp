#define QUIRE_ISA_NAME "i8mm"
#include "kernel_table.inl"
