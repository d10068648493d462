# Cross-compiles for 64-bit Arm Linux. Python_EXECUTABLE is the interpreter that tests/arm/install.py makes, which runs under
# qemu. CMake asks it where its headers and nanobind are. Debian's Python headers include one by a path from /usr/include.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
get_filename_component(ARM_DIR "${CMAKE_CURRENT_LIST_DIR}/../../build/arm" ABSOLUTE)
set(CMAKE_CXX_FLAGS_INIT "-idirafter ${ARM_DIR}/root/usr/include")
