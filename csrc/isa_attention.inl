// Attention. Instruction sets with the same vectors share it.
#pragma once

#include "attention.inl"
