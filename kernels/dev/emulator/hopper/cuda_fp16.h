// The words of CUDA C++, on the host.
#include "device.h"
