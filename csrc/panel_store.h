// A matrix in panels together with the memory it lies in: what Python holds as `Panels`. Kernels get the view only.
#pragma once

#include <cstddef>

#include "arena.h"
#include "panels.h"

namespace quire {

struct PanelStore {
  Panels view;
  ArenaPiece memory;

  // The shape is one that the format can hold.
  PanelStore(Format format, int64_t rows, int64_t cols)
      : view{format, rows, cols, nullptr}, memory(static_cast<size_t>(view.nbytes())) {
    view.data = memory.data();
  }
};

}  // namespace quire
