# The translation units of each instruction set: isa_<name>_<part>.cpp, which include isa_<part>.inl and are compiled
# with the set's flags. Parts are compiled side by side, so the longest come first. Code that runs on every machine is
# compiled with QUIRE_HAS_<NAME>. It calls the others after a check of the CPU.
include(CheckCXXSourceCompiles)

# A wheel has all instruction sets. A build in the checkout has those that this machine reports, and the most common
# one: each takes 10 to 30 seconds to compile.
if(IN_TREE)
  set(DEFAULT_ISAS native)
else()
  set(DEFAULT_ISAS all)
endif()
set(QUIRE_ISAS ${DEFAULT_ISAS} CACHE STRING "native: the instruction sets that this machine reports; or all")
set(REPORTED "")
if(QUIRE_ISAS STREQUAL "native" AND NOT CMAKE_CROSSCOMPILING AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo REPORTED REGEX "^(flags|Features)" LIMIT_COUNT 1)
endif()

# `base` is the set whose attention this one uses: itself, or one with the same vectors that is always built with it.
# `flag` is the CPU's flag in Linux's notation, or empty. `probe` is a statement that compiles only if the compiler and
# the assembler support the instruction set. `header` declares what it calls. The other arguments are the compiler's
# flags.
function(add_isa name base flag header probe)
  string(TOUPPER "${name}" NAME)
  if(REPORTED AND flag AND NOT REPORTED MATCHES "[ \t]${flag}( |$)")
    message(STATUS "This machine does not report ${flag}: built without ${name}")
    return()
  endif()
  list(JOIN ARGN " " CMAKE_REQUIRED_FLAGS)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  check_cxx_source_compiles("#include <${header}>\nvoid probe() { ${probe}; }" KNOWS_${NAME})
  string(TOUPPER "QUIRE_HAS_${base}" has_base)
  if(NOT base STREQUAL name AND NOT has_base IN_LIST ISA_DEFINITIONS)
    message(STATUS "There is no ${base}: built without ${name}")
    return()
  endif()
  if(NOT KNOWS_${NAME})
    message(STATUS "The compiler does not know ${name}: built without it")
    return()
  endif()
  set(options ${ARGN} -Wno-unused-function -Wno-uninitialized)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND options -Wno-maybe-uninitialized)  # a false positive in GCC 12's intrinsics
  endif()
  set(parts gguf groups unpacked table)
  if(base STREQUAL name)
    set(parts gguf groups attention unpacked table)
  endif()
  foreach(part ${parts})
    set(source "${CMAKE_CURRENT_BINARY_DIR}/isa_${name}_${part}.cpp")
    file(CONFIGURE OUTPUT "${source}" CONTENT
         "#define QUIRE_ISA ${name}\n#define QUIRE_ISA_NAME \"${name}\"\n#define QUIRE_BASE ${base}\n#include \"isa_${part}.inl\"\n")
    set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${options}")
    list(APPEND ISA_SOURCES "${source}")
  endforeach()
  list(APPEND ISA_DEFINITIONS QUIRE_HAS_${NAME})
  set(ISA_SOURCES ${ISA_SOURCES} PARENT_SCOPE)
  set(ISA_DEFINITIONS ${ISA_DEFINITIONS} PARENT_SCOPE)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(${X86})$")
  set(AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c)
  add_isa(avx512 avx512 avx512_vnni immintrin.h
          "_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512())"
          ${AVX512})
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")  # kernels.cpp requests the tiles from the Linux kernel
    add_isa(amx avx512 amx_int8 immintrin.h "_tile_zero(0); _tile_dpbusd(0, 1, 2)" ${AVX512} -mamx-tile -mamx-int8)
  endif()
  add_isa(avx2 avx2 "" immintrin.h
          "_mm256_fmadd_ps(_mm256_cvtph_ps(_mm_setzero_si128()), _mm256_setzero_ps(), _mm256_setzero_ps())"
          -mavx2 -mfma -mf16c)
  add_isa(avxvnni avx2 avx_vnni immintrin.h
          "_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256())"
          -mavx2 -mfma -mf16c -mavxvnni)
else()
  add_isa(neon neon "" arm_neon.h "vfmaq_f32(vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0))" -march=armv8-a)
  add_isa(dotprod neon asimddp arm_neon.h "vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(0), vdupq_n_s8(0))" -march=armv8.2-a+dotprod)
  add_isa(i8mm neon i8mm arm_neon.h "vusmmlaq_s32(vdupq_n_s32(0), vdupq_n_u8(0), vdupq_n_s8(0))" -march=armv8.2-a+dotprod+i8mm)
endif()
