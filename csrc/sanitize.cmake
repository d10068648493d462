# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer. Python itself is not built with them, so
# the sanitizer's library must be loaded first: preload.txt holds the value of LD_PRELOAD. It includes libstdc++ because
# the sanitizer looks up the function that throws exceptions when it starts.
#
# Unrolled kernels have thousands of loads. So checks are calls instead of inline code, and pointer checks that the
# address check repeats are disabled. Otherwise one file takes ten minutes to compile.
set(SANITIZERS -fsanitize=address,undefined -fno-sanitize=vptr,null,alignment,object-size,pointer-overflow
    -fno-sanitize-recover=all)
target_compile_options(_native PRIVATE ${SANITIZERS} --param asan-instrumentation-with-call-threshold=0 -O1 -g1
                       -fno-omit-frame-pointer)
target_link_options(_native PRIVATE ${SANITIZERS})

set(PRELOAD "")
foreach(library libasan.so libstdc++.so)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=${library}
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT IS_ABSOLUTE "${found}")
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has no ${library}; a sanitized build needs g++ and its sanitizers.")
  endif()
  get_filename_component(found "${found}" REALPATH)
  list(APPEND PRELOAD "${found}")
endforeach()
list(JOIN PRELOAD ":" PRELOAD)
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/preload.txt" "${PRELOAD}\n")
