/* A stand-in for libnvidia-ml.so.1: two GPUs, and what an environment variable says of their processes. Built by test_nvml.py. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

typedef struct { unsigned pid; unsigned long long used; unsigned gi; unsigned ci; } process_t;
static const char *uuids[2] = {"GPU-first", "GPU-second"};

static int of(const char *variable) { const char *text = getenv(variable); return text ? atoi(text) : 0; }

int nvmlInit_v2(void) { return of("FAKE_NVML_INIT"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "550.54.15"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (size_t i = 0; i < 2; i++) if (!strcmp(uuid, uuids[i])) { *handle = (void *)(i + 1); return 0; }
    return 6;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { snprintf(text, size, "%s", uuids[(size_t)handle - 1]); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { snprintf(text, size, "NVIDIA H200"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = (size_t)handle == 1 ? 9 : 8; *minor = (size_t)handle == 1 ? 0 : 6; return 0;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1980 : 3201; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) { *celsius = 41; return (size_t)handle == 2 ? 3 : 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) { *reasons = 0x1 | 0x4 | 0x40; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *found) {
    unsigned num = of("FAKE_NVML_PROCESSES");
    if (num > *count) { *count = num; return 7; }
    for (unsigned i = 0; i < num; i++) found[i].pid = i ? 1000000 + i : (unsigned)of("FAKE_NVML_PID");
    *count = num;
    return 0;
}
