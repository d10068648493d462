// A matrix in panels and its memory. Python has it as `Panels`. Kernels get only the view.
#pragma once

#include <cstddef>

#include "arena.h"
#include "panels.h"

namespace quire {

struct PanelStore {
  Panels view;
  ArenaPiece memory;

  // The format must support the shape.
  PanelStore(Format format, int64_t rows, int64_t cols)
      : view{format, rows, cols, nullptr}, memory(static_cast<size_t>(view.nbytes())) {
    view.data = memory.data();
  }
};

}  // namespace quire
