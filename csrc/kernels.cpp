#include "kernels.h"

#include <cstring>

#ifdef QUIRE_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

#define QUIRE_DECLARE(isa)      \
  namespace isa {               \
  const KernelTable& kernels(); \
  }

#ifdef QUIRE_HAS_AVX2
QUIRE_DECLARE(avx2)
#endif
#ifdef QUIRE_HAS_AVXVNNI
QUIRE_DECLARE(avxvnni)
#endif
#ifdef QUIRE_HAS_AVX512
QUIRE_DECLARE(avx512)
#endif
#ifdef QUIRE_HAS_AMX
QUIRE_DECLARE(amx)
#endif
#ifdef QUIRE_HAS_NEON
QUIRE_DECLARE(neon)
#endif
#ifdef QUIRE_HAS_DOTPROD
QUIRE_DECLARE(dotprod)
#endif
#ifdef QUIRE_HAS_I8MM
QUIRE_DECLARE(i8mm)
#endif

#ifdef QUIRE_HAS_AMX
// A process must request the tile registers from the Linux kernel (arch_prctl ARCH_REQ_XCOMP_PERM, tile data).
static bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

const KernelTable* find_kernels([[maybe_unused]] const char* name) {
#ifdef QUIRE_HAS_AVX2
  if (!std::strcmp(name, "avx2")) return &avx2::kernels();
#endif
#ifdef QUIRE_HAS_AVXVNNI
  if (!std::strcmp(name, "avxvnni")) return &avxvnni::kernels();
#endif
#ifdef QUIRE_HAS_AVX512
  if (!std::strcmp(name, "avx512")) return &avx512::kernels();
#endif
#ifdef QUIRE_HAS_AMX
  if (!std::strcmp(name, "amx")) {
    static const bool granted = request_tiles();
    return granted ? &amx::kernels() : nullptr;
  }
#endif
#ifdef QUIRE_HAS_NEON
  if (!std::strcmp(name, "neon")) return &neon::kernels();
#endif
#ifdef QUIRE_HAS_DOTPROD
  if (!std::strcmp(name, "dotprod")) return &dotprod::kernels();
#endif
#ifdef QUIRE_HAS_I8MM
  if (!std::strcmp(name, "i8mm")) return &i8mm::kernels();
#endif
  return nullptr;
}

}  // namespace quire
