// Python bindings for tests of the pool.
#include <nanobind/nanobind.h>

#include <vector>

#include "bindings.h"
#include "pool.h"

namespace quire {

namespace {

struct Cell {
  alignas(64) int64_t value = 0;
  int64_t total = 0;
};

struct Sum {
  int rounds;
  std::vector<Cell> cells;
};

// In each round every thread writes one number and then adds up the numbers of all threads.
void add_rounds(void* argument, Worker worker) {
  Sum& sum = *static_cast<Sum*>(argument);
  Cell& own = sum.cells[worker.index];
  for (int round = 0; round < sum.rounds; ++round) {
    own.value = int64_t{round} * worker.count() + worker.index;
    worker.barrier();
    for (const Cell& cell : sum.cells) own.total += cell.value;
    worker.barrier();
  }
}

// Every thread adds up the n = rounds * threads numbers 0 to n - 1. The result is threads * n * (n - 1) / 2 if every
// thread has read what every other thread wrote.
int64_t team_sum(int threads, int rounds) {
  Sum sum{rounds, std::vector<Cell>(threads > 0 ? threads : 0)};
  run_team(threads, add_rounds, &sum);
  int64_t total = 0;
  for (const Cell& cell : sum.cells) total += cell.total;
  return total;
}

}  // namespace

void bind_pool(nanobind::module_& module) {
  module.def("team_sum", &team_sum, nanobind::arg("threads"), nanobind::arg("rounds"),
             nanobind::call_guard<ReleasedGil>());
}

}  // namespace quire
