# One translation unit for each instruction set: isa_<name>.cpp, compiled with its own flags. Code that runs on every
# machine is compiled with QUIRE_HAS_<NAME>. It calls the others after a check of the CPU.
include(CheckCXXSourceCompiles)

# `probe` is a statement that compiles only if the compiler and the assembler support the instruction set.
function(add_isa name probe)
  string(TOUPPER "${name}" NAME)
  list(JOIN ARGN " " CMAKE_REQUIRED_FLAGS)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  check_cxx_source_compiles("#include <immintrin.h>\nvoid probe() { ${probe}; }" KNOWS_${NAME})
  if(NOT KNOWS_${NAME})
    message(STATUS "The compiler does not know ${name}: built without it")
    return()
  endif()
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/isa_${name}.cpp")
  set(options ${ARGN} -DQUIRE_ISA=${name} -Wno-unused-function -Wno-uninitialized)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND options -Wno-maybe-uninitialized)  # a false positive in GCC 12's intrinsics
  endif()
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${options}")
  target_sources(_native PRIVATE "${source}")
  target_compile_definitions(_native PRIVATE QUIRE_HAS_${NAME})
endfunction()
