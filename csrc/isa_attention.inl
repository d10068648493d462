// Attention, which isa_table.inl lists.
#pragma once

#include "attention.inl"
