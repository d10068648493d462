#define QUIRE_ISA_NAME "dotprod"
#include "kernel_table.inl"
