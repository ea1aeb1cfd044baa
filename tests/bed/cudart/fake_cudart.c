/* A CUDA runtime without a card: device memory is files, so that several processes can export and open it.

   It keeps the rules of CUDA IPC that bite, and breaks the caller that breaks them:
     - The exporting process cannot open its own handle (201). What counts is the number of the process.
     - A process maps an allocation once: a second open gives the same pointer and counts up, closing counts down.
     - A handle means the whole allocation, whatever pointer into it was given.
     - Memory freed and allocated again at the same address has the same handle, byte for byte. Whoever opens it while
       the old mapping is open gets the old memory.
     - Freed or orphaned memory stays, and is counted, until the last process that has it mapped lets it go.
     - A copy only waits in its stream. It moves the bytes when the stream or the device is synchronised (or some time
       later, see COPY_MS), and what it reads or writes must be mapped then: otherwise error 700, for good.
     - Host memory that a copy reads or writes is in one registered range, or in none: otherwise error 1.
     - The last error of a thread stays until it is asked for.

   Environment, read at every call:
     FAKE_CUDART_DIR           folder of the devices' memory
     FAKE_CUDART_DEVICES       devices of the machine (1)
     FAKE_CUDART_VISIBLE       the devices that this process sees, in its order, as in "1,0" (all); others open as error 1
     FAKE_CUDART_MEMORY        bytes of each device (1 GiB)
     FAKE_CUDART_NO_P2P        pairs of devices that cannot reach each other, as in "0-1,1-2", or "all"
     FAKE_CUDART_PID           number of this process in its namespace (its real one)
     FAKE_CUDART_COPY_MS       a copy also moves its bytes by itself after so many milliseconds
     FAKE_CUDART_MIG           if set, devices are slices of a card
     FAKE_CUDART_FAIL          a call and the error it returns, as in "cudaIpcOpenMemHandle=205"
     FAKE_CUDART_NO_READ_ONLY  if set, host memory cannot be registered read-only

   Files: mem-DEVICE-ID is an allocation, its shared lock held by all that map it. export-DEVICE-PID-BASE says which
   allocation a handle means, its exclusive lock held by the exporter. A file that nobody locks is left by the dead. */

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    DEVICE_UNINITIALIZED = 201,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_RESOURCE_HANDLE = 400,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

#define MAX_SPANS 256
#define MAX_STREAMS 256
#define MAX_COPIES 4096
#define MAX_DEVICES 8
#define HANDLE_NBYTES 64
/* Where allocations begin, and where mappings of others' do: fixed, so that a new process gets the same addresses. */
#define OWN_BASE 0x100000000000ULL
#define OPEN_BASE 0x300000000000ULL
#define BASES_END 0x500000000000ULL
#define DEVICE_STEP 0x010000000000ULL
#define GRAIN (2ULL << 20)

typedef struct {
    uint64_t magic;
    int64_t pid, device;
    uint64_t base, nbytes;
    char rest[HANDLE_NBYTES - 40];
} Handle;

typedef struct {
    uint64_t base, nbytes;
    int device, opens; /* opens: 0 for an allocation of this process */
    int context;       /* the device in whose context it was opened */
    int fd, export_fd;
    Handle handle;
} Span;

typedef struct {
    char *dst;
    const char *src;
    size_t nbytes;
} Copy;

typedef struct {
    int device, live, count;
    Copy copies[MAX_COPIES];
} Stream;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static Span spans[MAX_SPANS];
static Stream *streams[MAX_STREAMS];
static Span registered[MAX_SPANS];
static int sticky;
static __thread int current, last_error;

/* ---- environment ---- */

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

static const char *folder(void) {
    const char *text = getenv("FAKE_CUDART_DIR");
    if (!text) {
        fprintf(stderr, "FAKE_CUDART_DIR is not set\n");
        abort();
    }
    return text;
}

static long process_number(void) { return number("FAKE_CUDART_PID", getpid()); }

static int injected(const char *call) {
    const char *text = getenv("FAKE_CUDART_FAIL");
    size_t length = strlen(call);
    return text && !strncmp(text, call, length) && text[length] == '=' ? atoi(text + length + 1) : OK;
}

/* The device of the machine behind each one that this process sees. */
static int visible(int *devices) {
    int machine = (int)number("FAKE_CUDART_DEVICES", 1), count = 0;
    const char *text = getenv("FAKE_CUDART_VISIBLE");
    if (!text) {
        for (; count < machine; count++)
            devices[count] = count;
        return count;
    }
    while (*text && count < MAX_DEVICES) {
        devices[count++] = atoi(text);
        text = strchrnul(text, ',');
        text += *text == ',';
    }
    return count;
}

static int machine_device(int ordinal) {
    int devices[MAX_DEVICES], count = visible(devices);
    return ordinal >= 0 && ordinal < count ? devices[ordinal] : -1;
}

static int sees(int device) {
    int devices[MAX_DEVICES], count = visible(devices);
    for (int i = 0; i < count; i++)
        if (devices[i] == device)
            return 1;
    return 0;
}

static int reaches(int a, int b) {
    const char *text = getenv("FAKE_CUDART_NO_P2P");
    if (a == b || !text)
        return 1;
    char one[16], other[16];
    snprintf(one, sizeof one, "%d-%d", a, b);
    snprintf(other, sizeof other, "%d-%d", b, a);
    return strcmp(text, "all") && !strstr(text, one) && !strstr(text, other);
}

/* ---- errors ---- */

static int fail(int code) {
    if (code)
        last_error = code;
    return code;
}

#define BEGIN(call)                                                                                                    \
    pthread_mutex_lock(&guard);                                                                                        \
    int code = sticky ? sticky : injected(call);                                                                       \
    if (code)                                                                                                          \
        goto end;
#define END                                                                                                            \
    end:                                                                                                               \
    pthread_mutex_unlock(&guard);                                                                                      \
    return fail(code);
#define RETURN(value)                                                                                                  \
    do {                                                                                                               \
        code = (value);                                                                                                \
        goto end;                                                                                                      \
    } while (0)

const char *cudaGetErrorName(int code) {
    switch (code) {
    case OK: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case DEVICE_UNINITIALIZED: return "cudaErrorDeviceUninitialized";
    case 205: return "cudaErrorMapBufferObjectFailed";
    case PEER_ACCESS_UNSUPPORTED: return "cudaErrorPeerAccessUnsupported";
    case INVALID_RESOURCE_HANDLE: return "cudaErrorInvalidResourceHandle";
    case ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
    case 711: return "cudaErrorTooManyPeers";
    case ALREADY_REGISTERED: return "cudaErrorHostMemoryAlreadyRegistered";
    case NOT_REGISTERED: return "cudaErrorHostMemoryNotRegistered";
    case NOT_SUPPORTED: return "cudaErrorNotSupported";
    case UNKNOWN: return "cudaErrorUnknown";
    default: return "unrecognized error code";
    }
}

int cudaGetLastError(void) {
    int code = sticky ? sticky : last_error;
    last_error = OK;
    return code;
}

int cudaPeekAtLastError(void) { return sticky ? sticky : last_error; }

/* ---- files that several processes share ---- */

static int open_in_folder(const char *name, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    return open(path, flags | O_CLOEXEC, 0600);
}

static void unlink_in_folder(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    unlink(path);
}

/* Whoever looks at or changes the folder holds this: an exclusive lock on the folder itself. */
static int enter(void) {
    int fd = open(folder(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        perror(folder());
        abort();
    }
    flock(fd, LOCK_EX);
    return fd;
}

static void leave(int fd) { close(fd); }

static int is_used(const char *name) {
    int fd = open_in_folder(name, O_RDONLY);
    if (fd < 0)
        return 0;
    int used = flock(fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return used;
}

/* Remove what the dead left; the bytes in use on a device, and through `last` the largest id of an allocation. */
static uint64_t sweep(int device, long *last) {
    uint64_t used = 0;
    DIR *dir = opendir(folder());
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        int of_device;
        long id;
        struct stat found;
        if (entry->d_name[0] == '.')
            continue;
        int is_memory = sscanf(entry->d_name, "mem-%d-%ld", &of_device, &id) == 2;
        if (is_memory && last && id > *last)
            *last = id;
        if (!is_used(entry->d_name)) {
            unlink_in_folder(entry->d_name);
            continue;
        }
        if (is_memory && of_device == device && !fstatat(dirfd(dir), entry->d_name, &found, 0))
            used += (uint64_t)found.st_size;
    }
    if (dir)
        closedir(dir);
    return used;
}

static void export_name(char *name, size_t room, const Handle *handle) {
    snprintf(name, room, "export-%ld-%ld-%lx", (long)handle->device, (long)handle->pid, (unsigned long)handle->base);
}

/* ---- spans of this process's address space ---- */

static Span *span_at(uint64_t address, uint64_t nbytes) {
    for (Span *span = spans; span < spans + MAX_SPANS; span++)
        if (span->nbytes && address >= span->base && address + nbytes <= span->base + span->nbytes)
            return span;
    return NULL;
}

static int is_device_address(const void *pointer) {
    return (uint64_t)pointer >= OWN_BASE && (uint64_t)pointer < BASES_END;
}

static int is_reachable(const void *pointer, size_t nbytes) {
    return !is_device_address(pointer) || span_at((uint64_t)pointer, nbytes);
}

static uint64_t first_room(uint64_t base, uint64_t nbytes) {
    for (int moved = 1; moved;) {
        moved = 0;
        for (Span *span = spans; span < spans + MAX_SPANS; span++)
            if (span->nbytes && base < span->base + span->nbytes && span->base < base + nbytes) {
                base = (span->base + span->nbytes + GRAIN - 1) / GRAIN * GRAIN;
                moved = 1;
            }
    }
    return base;
}

/* Map a file that is open and locked; NULL when there is no room. */
static Span *map_span(uint64_t base, uint64_t nbytes, int fd) {
    for (Span *span = spans; span < spans + MAX_SPANS; span++)
        if (!span->nbytes) {
            base = first_room(base, nbytes);
            void *got = mmap((void *)base, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
            if (got == MAP_FAILED)
                return NULL;
            *span = (Span){.base = base, .nbytes = nbytes, .fd = fd, .export_fd = -1};
            return span;
        }
    return NULL;
}

static void unmap_span(Span *span) {
    munmap((void *)span->base, span->nbytes);
    if (span->export_fd >= 0)
        close(span->export_fd);
    close(span->fd);
    span->nbytes = 0;
    int entered = enter();
    sweep(-1, NULL);
    leave(entered);
}

/* ---- devices ---- */

int cudaGetDeviceCount(int *count) {
    int devices[MAX_DEVICES];
    BEGIN("cudaGetDeviceCount")
    *count = visible(devices);
    RETURN(*count ? OK : NO_DEVICE);
    END
}

int cudaSetDevice(int device) {
    BEGIN("cudaSetDevice")
    if (machine_device(device) < 0)
        RETURN(INVALID_DEVICE);
    current = device;
    END
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    BEGIN("cudaDeviceCanAccessPeer")
    if (machine_device(device) < 0 || machine_device(peer) < 0)
        RETURN(INVALID_DEVICE);
    *can = device != peer && reaches(machine_device(device), machine_device(peer));
    END
}

int cudaDeviceGetPCIBusId(char *text, int room, int device) {
    BEGIN("cudaDeviceGetPCIBusId")
    if (machine_device(device) < 0)
        RETURN(INVALID_DEVICE);
    snprintf(text, (size_t)room, "0000:%02x:00.0", machine_device(device) + 1);
    END
}

/* Of the structure only what all versions begin with: char name[256], then 16 bytes of uuid. */
static int properties(char *out, int device) {
    int physical = machine_device(device);
    if (physical < 0)
        return INVALID_DEVICE;
    memset(out, 0, 272);
    strcpy(out, getenv("FAKE_CUDART_MIG") ? "Fake GPU MIG 1g.10gb" : "Fake GPU");
    memset(out + 256, 0xfa, 16);
    out[256 + 15] = (char)physical;
    return OK;
}

int cudaGetDeviceProperties(char *out, int device) {
    BEGIN("cudaGetDeviceProperties")
    RETURN(properties(out, device));
    END
}

int cudaGetDeviceProperties_v2(char *out, int device) {
    BEGIN("cudaGetDeviceProperties")
    RETURN(properties(out, device));
    END
}

int cudaMemGetInfo(size_t *free_nbytes, size_t *total) {
    BEGIN("cudaMemGetInfo")
    int entered = enter();
    uint64_t used = sweep(machine_device(current), NULL);
    leave(entered);
    *total = (size_t)number("FAKE_CUDART_MEMORY", 1L << 30);
    *free_nbytes = used < *total ? *total - used : 0;
    END
}

/* ---- memory ---- */

static int allocate(void **pointer, size_t nbytes) {
    char name[64];
    long id = 0;
    int device = machine_device(current);
    uint64_t used = sweep(device, &id);
    if (used + nbytes > (uint64_t)number("FAKE_CUDART_MEMORY", 1L << 30))
        return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "mem-%d-%ld", device, id + 1);
    int fd = open_in_folder(name, O_RDWR | O_CREAT | O_EXCL);
    if (fd < 0 || flock(fd, LOCK_SH | LOCK_NB) || ftruncate(fd, (off_t)nbytes))
        return UNKNOWN;
    Span *span = map_span(OWN_BASE + (uint64_t)device * DEVICE_STEP, nbytes, fd);
    if (!span)
        return UNKNOWN;
    memset((void *)span->base, 0xcb, nbytes); /* as anything that lay there before */
    span->device = device;
    span->handle =
        (Handle){.magic = 0x4b41, .pid = process_number(), .device = device, .base = span->base, .nbytes = nbytes};
    *pointer = (void *)span->base;
    return OK;
}

int cudaMalloc(void **pointer, size_t nbytes) {
    BEGIN("cudaMalloc")
    if (!nbytes) {
        *pointer = NULL;
        RETURN(OK);
    }
    int entered = enter();
    code = allocate(pointer, nbytes);
    leave(entered);
    END
}

static int run(Stream *stream);

static int run_all(int device) {
    int code = OK;
    for (int i = 0; i < MAX_STREAMS && !code; i++)
        if (streams[i] && (device < 0 || streams[i]->device == device))
            code = run(streams[i]);
    return code;
}

int cudaFree(void *pointer) {
    BEGIN("cudaFree")
    if (!pointer)
        RETURN(OK);
    Span *span = span_at((uint64_t)pointer, 1);
    if (!span || span->opens || span->base != (uint64_t)pointer)
        RETURN(INVALID_VALUE);
    code = run_all(-1); /* it waits for what runs */
    unmap_span(span);
    END
}

/* ---- IPC ---- */

static int export_span(Span *span) {
    char name[128], text[64];
    struct stat found;
    export_name(name, sizeof name, &span->handle);
    unlink_in_folder(name); /* of a dead process, or of freed memory at the same address */
    int fd = open_in_folder(name, O_RDWR | O_CREAT | O_EXCL);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) || fstat(span->fd, &found))
        return UNKNOWN;
    int length = snprintf(text, sizeof text, "%lu", (unsigned long)found.st_ino);
    if (write(fd, text, (size_t)length) != length)
        return UNKNOWN;
    span->export_fd = fd;
    return OK;
}

int cudaIpcGetMemHandle(Handle *handle, void *pointer) {
    BEGIN("cudaIpcGetMemHandle")
    Span *span = span_at((uint64_t)pointer, 1);
    if (!span || span->opens)
        RETURN(INVALID_VALUE);
    if (span->export_fd < 0) {
        int entered = enter();
        code = export_span(span);
        leave(entered);
    }
    *handle = span->handle;
    END
}

/* The memory file with this inode, its shared lock taken; -1 when there is none. */
static int open_memory(unsigned long inode) {
    int fd = -1;
    DIR *dir = opendir(folder());
    for (struct dirent *entry; dir && fd < 0 && (entry = readdir(dir));)
        if (entry->d_ino == inode && !strncmp(entry->d_name, "mem-", 4))
            fd = open_in_folder(entry->d_name, O_RDWR);
    if (dir)
        closedir(dir);
    if (fd >= 0)
        flock(fd, LOCK_SH | LOCK_NB);
    return fd;
}

static int open_export(void **pointer, const Handle *handle) {
    char name[128], text[64] = "";
    export_name(name, sizeof name, handle);
    if (!is_used(name))
        return INVALID_RESOURCE_HANDLE; /* its exporter is dead, or has freed it */
    int fd = open_in_folder(name, O_RDONLY);
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    int memory = length > 0 ? open_memory(strtoul(text, NULL, 10)) : -1;
    if (memory < 0)
        return INVALID_RESOURCE_HANDLE;
    Span *span = map_span(OPEN_BASE, handle->nbytes, memory);
    if (!span) {
        close(memory);
        return UNKNOWN;
    }
    span->device = (int)handle->device;
    span->context = current;
    span->opens = 1;
    span->handle = *handle;
    *pointer = (void *)span->base;
    return OK;
}

int cudaIpcOpenMemHandle(void **pointer, Handle handle, unsigned flags) {
    BEGIN("cudaIpcOpenMemHandle")
    if (flags != 1 || handle.magic != 0x4b41)
        RETURN(INVALID_VALUE);
    if (handle.pid == process_number())
        RETURN(DEVICE_UNINITIALIZED);
    if (!sees((int)handle.device))
        RETURN(INVALID_VALUE);
    if (!reaches(machine_device(current), (int)handle.device))
        RETURN(PEER_ACCESS_UNSUPPORTED);
    for (Span *span = spans; span < spans + MAX_SPANS; span++)
        if (span->nbytes && span->opens && !memcmp(&span->handle, &handle, sizeof handle)) {
            if (span->context != current)
                RETURN(INVALID_VALUE); /* one context of another process may open it */
            span->opens++;
            *pointer = (void *)span->base;
            RETURN(OK);
        }
    int entered = enter();
    code = open_export(pointer, &handle);
    leave(entered);
    END
}

int cudaIpcCloseMemHandle(void *pointer) {
    BEGIN("cudaIpcCloseMemHandle")
    Span *span = span_at((uint64_t)pointer, 1);
    if (!span || !span->opens || span->base != (uint64_t)pointer)
        RETURN(INVALID_VALUE);
    if (--span->opens == 0)
        unmap_span(span);
    END
}

/* ---- streams and copies ---- */

/* Move what waits in a stream, in order. */
static int run(Stream *stream) {
    for (int i = 0; i < stream->count && !sticky; i++) {
        Copy copy = stream->copies[i];
        if (!is_reachable(copy.src, copy.nbytes) || !is_reachable(copy.dst, copy.nbytes))
            sticky = ILLEGAL_ADDRESS;
        else
            memmove(copy.dst, copy.src, copy.nbytes);
    }
    stream->count = 0;
    return sticky;
}

static Stream *stream_of(void *pointer) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i] == pointer && pointer && streams[i]->live)
            return streams[i];
    return NULL;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    BEGIN("cudaStreamCreateWithFlags")
    if (flags > 1)
        RETURN(INVALID_VALUE);
    for (int i = 0; i < MAX_STREAMS; i++)
        if (!streams[i] || !streams[i]->live) {
            if (!streams[i])
                streams[i] = calloc(1, sizeof(Stream));
            streams[i]->live = 1;
            streams[i]->device = current;
            *stream = streams[i];
            RETURN(OK);
        }
    code = UNKNOWN;
    END
}

int cudaStreamSynchronize(void *pointer) {
    BEGIN("cudaStreamSynchronize")
    Stream *stream = stream_of(pointer);
    RETURN(stream ? run(stream) : INVALID_RESOURCE_HANDLE);
    END
}

int cudaStreamDestroy(void *pointer) {
    BEGIN("cudaStreamDestroy")
    Stream *stream = stream_of(pointer);
    if (!stream)
        RETURN(INVALID_RESOURCE_HANDLE);
    code = run(stream);
    stream->live = 0;
    END
}

int cudaDeviceSynchronize(void) {
    BEGIN("cudaDeviceSynchronize")
    RETURN(run_all(current));
    END
}

static void *run_later(void *stream) {
    long ms = number("FAKE_CUDART_COPY_MS", 0);
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
    pthread_mutex_lock(&guard);
    run(stream);
    pthread_mutex_unlock(&guard);
    return NULL;
}

/* Whether these are all of one registered range, or none of any. */
static int is_in_one_piece(const void *pointer, size_t nbytes) {
    uint64_t first = (uint64_t)pointer;
    for (Span *span = registered; span < registered + MAX_SPANS; span++)
        if (span->nbytes && first < span->base + span->nbytes && span->base < first + nbytes)
            return first >= span->base && first + nbytes <= span->base + span->nbytes;
    return 1;
}

int cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, int kind, void *pointer) {
    BEGIN("cudaMemcpyAsync")
    Stream *stream = stream_of(pointer);
    if (!stream)
        RETURN(INVALID_RESOURCE_HANDLE);
    if (kind < 0 || kind > 4 || !dst || !src || !is_reachable(src, nbytes) || !is_reachable(dst, nbytes) ||
        !is_in_one_piece(src, nbytes) || !is_in_one_piece(dst, nbytes))
        RETURN(INVALID_VALUE);
    if (stream->count == MAX_COPIES)
        run(stream); /* a full queue makes the caller wait */
    stream->copies[stream->count++] = (Copy){dst, src, nbytes};
    if (getenv("FAKE_CUDART_COPY_MS")) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_later, stream))
            RETURN(UNKNOWN);
        pthread_detach(thread);
    }
    END
}

/* ---- host memory ---- */

static int is_writable(const void *pointer) {
    char line[4096], permissions[8];
    uint64_t begin, end;
    int writable = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, permissions) == 3 && (uint64_t)pointer >= begin &&
            (uint64_t)pointer < end)
            writable = permissions[1] == 'w';
    if (maps)
        fclose(maps);
    return writable;
}

int cudaHostRegister(void *pointer, size_t nbytes, unsigned flags) {
    BEGIN("cudaHostRegister")
    int read_only = (flags & 8) != 0;
    if (!pointer || !nbytes || flags > 15)
        RETURN(INVALID_VALUE);
    if (read_only && getenv("FAKE_CUDART_NO_READ_ONLY"))
        RETURN(NOT_SUPPORTED);
    if (!read_only && !is_writable(pointer))
        RETURN(INVALID_VALUE);
    Span *room = NULL;
    for (Span *span = registered; span < registered + MAX_SPANS; span++) {
        if (!span->nbytes)
            room = span;
        else if ((uint64_t)pointer < span->base + span->nbytes && span->base < (uint64_t)pointer + nbytes)
            RETURN(ALREADY_REGISTERED);
    }
    if (!room)
        RETURN(OUT_OF_MEMORY);
    *room = (Span){.base = (uint64_t)pointer, .nbytes = nbytes};
    END
}

int cudaHostUnregister(void *pointer) {
    BEGIN("cudaHostUnregister")
    code = NOT_REGISTERED;
    for (Span *span = registered; span < registered + MAX_SPANS; span++)
        if (span->nbytes && span->base == (uint64_t)pointer) {
            span->nbytes = 0;
            code = OK;
        }
    END
}

/* ---- for tests ---- */

/* How many allocations and mappings this process has. */
int fakeSpans(void) {
    int count = 0;
    for (Span *span = spans; span < spans + MAX_SPANS; span++)
        count += span->nbytes != 0;
    return count;
}

/* As the end of this process: everything goes, the sticky error too. */
void fakeReset(void) {
    pthread_mutex_lock(&guard);
    for (Span *span = spans; span < spans + MAX_SPANS; span++)
        if (span->nbytes)
            unmap_span(span);
    for (int i = 0; i < MAX_STREAMS; i++)
        if (streams[i])
            streams[i]->live = streams[i]->count = 0;
    memset(registered, 0, sizeof registered);
    sticky = last_error = current = 0;
    pthread_mutex_unlock(&guard);
}
