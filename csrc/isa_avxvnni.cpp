#define QUIRE_ISA_NAME "avxvnni"
#include "kernel_table.inl"
