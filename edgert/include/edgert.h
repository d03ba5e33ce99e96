/* edgert.h: the C client of EdgeRT's local protocol (docs/protocol.md), in one header.
 *
 * Write this in one source file of the program:
 *
 *     #define EDGERT_IMPLEMENTATION
 *     #include "edgert.h"             // before other headers, or compile with -D_POSIX_C_SOURCE=200809L
 *
 * In all other files, write only the include. The header needs C99 (or C++11), libc and POSIX, and no library to link.
 * To find the file:
 *
 *     python3 -c "import edgert; print(edgert.include_dir())"
 *
 * A first answer:
 *
 *     edgert_error error;
 *     edgert_client *client = edgert_connect(NULL, "digits", 5000, &error);
 *     if (!client) { fprintf(stderr, "%s: %s\n", edgert_code_name(error.code), error.message); return 1; }
 *     const uint32_t shape[] = {1, 1, 8, 8};
 *     edgert_tensor input;
 *     edgert_response response;
 *     edgert_tensor_set(&input, EDGERT_FP32, shape, 4, pixels);
 *     if (edgert_infer(client, &input, 1, NULL, &response, &error) == EDGERT_OK)
 *         use((const float *)response.outputs[0].data);
 *     edgert_close(client);
 *
 * Ownership
 *   - A client is one connection. Only one thread at a time may use it; give each thread, and each process that you
 *     fork, its own client.
 *   - The client reads inputs only during the call, from their own memory, at any address.
 *   - On Linux, large inputs and outputs pass through memory that the daemon shares with this client. Define
 *     EDGERT_NO_SHARED_MEMORY before the include to turn this off.
 *   - Outputs are in the client's own buffer, each aligned to 64 bytes, until the next call with this client.
 *   - The result of edgert_describe is valid until the next call with this client: a call may reconnect to a new
 *     release of the model.
 *   - The client allocates memory when it connects or reconnects, and for an answer that is longer than all earlier
 *     answers. Otherwise, edgert_infer allocates nothing. You may define EDGERT_MALLOC, EDGERT_FREE and
 *     EDGERT_FRAME_BYTES_MAX before the include.
 *
 * Requests that are repeated
 *   - If the daemon moves the model to a new release (MOVED), or closes the connection before it has the whole
 *     request, no engine has seen the request: the client repeats it over a new connection, within its time-out.
 *   - If the worker is lost during a request (EDGERT_WORKER_LOST), the client does not repeat it: the request may have
 *     caused the crash. The next call connects again.
 *
 * Sessions (docs/streams.md)
 *   - edgert_session returns a client whose requests continue each other: the daemon keeps the model's state, and the
 *     values that the next window needs. It follows the model to another worker; this allocates memory temporarily.
 *   - EDGERT_SESSION_LOST means that the daemon lost the memory of the session. Close the client and start a new one.
 *
 * No call raises a signal (SIGPIPE) or prints; every wait ends at the call's time-out.
 */
#ifndef EDGERT_H
#define EDGERT_H

#if defined(EDGERT_IMPLEMENTATION) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#if defined(__GLIBC__) && !defined(__USE_POSIX199309)
#error "a system header precedes edgert.h: move edgert.h to the top, or compile with -D_POSIX_C_SOURCE=200809L"
#endif
#define _POSIX_C_SOURCE 200809L
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EDGERT_RANK_MAX 8
#define EDGERT_TENSORS_MAX 32
#define EDGERT_MESSAGE_BYTES 512

/* Numbers of the protocol, and of its table of errors. */
enum {
    EDGERT_OK = 0,
    EDGERT_INTERNAL = 1,           /* a fault in the daemon; see its log */
    EDGERT_INVALID = 10,           /* the request does not fit the model */
    EDGERT_PROTOCOL = 11,          /* the bytes are not this protocol */
    EDGERT_MODEL_NOT_FOUND = 12,   /* no version of this model is live */
    EDGERT_DEADLINE_EXCEEDED = 13, /* the time-out passed */
    EDGERT_NOT_ALLOWED = 14,       /* the device's configuration does not let this user connect */
    EDGERT_SESSION_LOST = 15,      /* the daemon lost the memory of the session: start a new one */
    EDGERT_UNAVAILABLE = 20,       /* the model is loading or failing; see retry_after_ms */
    EDGERT_OVERLOADED = 21,        /* a queue or the connections are at their limit; see retry_after_ms */
    EDGERT_WORKER_LOST = 22,       /* the worker ended during the request; the app decides whether to repeat it */
    EDGERT_UNREACHABLE = 23,       /* no daemon answers on the socket */
    EDGERT_SHUTTING_DOWN = 24,     /* the daemon stops */
    EDGERT_ENGINE_FAILED = 42,     /* the engine failed in this run */
    EDGERT_OUT_OF_MEMORY = 100     /* this program has no memory left */
};

/* Open Inference Protocol's names; BOOL is one byte. */
enum {
    EDGERT_BOOL = 1,
    EDGERT_UINT8 = 2,
    EDGERT_UINT16 = 3,
    EDGERT_UINT32 = 4,
    EDGERT_UINT64 = 5,
    EDGERT_INT8 = 6,
    EDGERT_INT16 = 7,
    EDGERT_INT32 = 8,
    EDGERT_INT64 = 9,
    EDGERT_FP16 = 10,
    EDGERT_FP32 = 11,
    EDGERT_FP64 = 12
};

typedef struct edgert_client edgert_client;

typedef struct edgert_error {
    int code;                           /* EDGERT_OK, or the code of the failure */
    int retryable;                      /* whether the same call may succeed later, unchanged */
    uint32_t retry_after_ms;            /* the daemon's advice; 0 for none */
    char message[EDGERT_MESSAGE_BYTES]; /* for people, in UTF-8; a longer message is cut */
} edgert_error;

/* One input or output of a model. -1 in `shape` means any length. */
typedef struct edgert_spec {
    const char *name;
    int datatype;
    int rank;
    int64_t shape[EDGERT_RANK_MAX];
} edgert_spec;

typedef struct edgert_model {
    const char *name;
    const char *engine;
    int64_t release;
    uint64_t frame_bytes_max; /* a longer request is refused */
    const edgert_spec *inputs;
    size_t input_count;
    const edgert_spec *outputs;
    size_t output_count;
    const edgert_spec *preprocess; /* the UINT8 tensor that the input of this name also accepts; NULL for none */
    const edgert_spec *files;      /* the same for image files (JPEG, PNG): one file per row, padded with zeros */
    const char *const *labels;     /* names of the classes; NULL if the model has none */
    size_t label_count;
} edgert_model;

/* An input or output tensor: C order, little-endian. */
typedef struct edgert_tensor {
    const char *name; /* the model's name; may be NULL for an input */
    int datatype;
    int rank;
    uint32_t shape[EDGERT_RANK_MAX];
    const void *data;
    size_t bytes;
} edgert_tensor;

typedef struct edgert_options {
    uint32_t timeout_ms; /* time-out of this request and of reconnecting; 0 for the client's time-out */
    int no_cache;        /* the engine answers, not the cache */
    int high_priority;   /* the request runs before other requests that wait for the engine */
} edgert_options;

typedef struct edgert_response {
    const edgert_tensor *outputs;
    size_t output_count;
    int64_t release;      /* the release that answered */
    uint32_t batch;       /* the number of items in the engine run; 0 if the cache answered */
    int cache_hit;
    int near_hit;         /* the cached answer belongs to a nearly equal input */
    uint32_t stage_us[6]; /* decode, preprocess, cache, queue, engine, postprocess */
} edgert_response;

/* Connect to the daemon for one model. `path` NULL: $EDGERT_SOCKET, else the first edgert.sock in $EDGERT_STATE,
 * /run/edgert, /var/lib/edgert, ~/.local/state/edgert. Waits at most `timeout_ms` (0: 30 s) for a model that is being
 * loaded; edgert_infer uses the same time-out by default. Returns NULL on failure. `error` may be NULL in every
 * call. */
edgert_client *edgert_connect(const char *path, const char *model, uint32_t timeout_ms, edgert_error *error);

/* Do the same for a session of the model. */
edgert_client *edgert_session(const char *path, const char *model, uint32_t timeout_ms, edgert_error *error);

/* Return the description of the model that the client received when it last connected. Never NULL. */
const edgert_model *edgert_describe(const edgert_client *client);

/* Answer one request; `inputs` are in the model's order. Returns EDGERT_OK or a code, the same as error->code. */
int edgert_infer(edgert_client *client, const edgert_tensor *inputs, size_t input_count,
                 const edgert_options *options, edgert_response *response, edgert_error *error);

/* Check that the model's worker answers. Returns EDGERT_OK or a code. A time-out of 0 means the client's. */
int edgert_ping(edgert_client *client, uint32_t timeout_ms, edgert_error *error);

/* Close the connection and free the client; NULL is allowed. */
void edgert_close(edgert_client *client);

/* Fill `tensor` for edgert_infer; `bytes` follows from shape and datatype. Returns EDGERT_OK or EDGERT_INVALID. */
int edgert_tensor_set(edgert_tensor *tensor, int datatype, const uint32_t *shape, int rank, const void *data);

size_t edgert_datatype_bytes(int datatype);      /* 0 for an unknown datatype */
const char *edgert_datatype_name(int datatype);  /* "FP32"; "" for an unknown datatype */
const char *edgert_code_name(int code);          /* "unavailable.overloaded": the stable code */

#ifdef __cplusplus
}
#endif
#endif /* EDGERT_H */

#if defined(EDGERT_IMPLEMENTATION) && !defined(EDGERT_IMPLEMENTED)
#define EDGERT_IMPLEMENTED

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "EdgeRT's tensors are little-endian; this processor is not"
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__) && !defined(EDGERT_NO_SHARED_MEMORY)
#define EDGERT__SHARES
#include <sys/mman.h>
#include <sys/stat.h>
#endif
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef EDGERT_MALLOC
#define EDGERT_MALLOC malloc
#define EDGERT_FREE free
#endif
#ifndef EDGERT_FRAME_BYTES_MAX
#define EDGERT_FRAME_BYTES_MAX (64u * 1024u * 1024u) /* the limit of an answer */
#endif
#define EDGERT__META_BYTES_MAX (1024u * 1024u)
#define EDGERT__HELLO_BYTES_MAX 4096u
#define EDGERT__TIMEOUT_MS 30000u
#define EDGERT__RETRY_PAUSE_MS 50u
#define EDGERT__SEND_BUFFER_BYTES (1024 * 1024) /* a large request then takes one system call */
#ifndef EDGERT_SHARE_BYTES_MIN
#define EDGERT_SHARE_BYTES_MIN (16u * 1024u) /* the socket is cheaper for smaller frames */
#endif
#define EDGERT__GET_SEALS 1034              /* F_GET_SEALS, and F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW */
#define EDGERT__SEALS 7
#define EDGERT__JSON_DEPTH_MAX 32
#define EDGERT__AGAIN (-1) /* no engine saw the request: repeat it after the error's retry_after_ms */

enum {
    EDGERT__HELLO = 1,
    EDGERT__WELCOME,
    EDGERT__INFER,
    EDGERT__RESULT,
    EDGERT__ERROR,
    EDGERT__PING,
    EDGERT__PONG,
    EDGERT__MOVED,
    EDGERT__RESUME
};
enum {
    EDGERT__FLAG_NO_CACHE = 1,
    EDGERT__FLAG_CACHE_HIT = 2,
    EDGERT__FLAG_SHARED = 4,
    EDGERT__FLAG_HIGH_PRIORITY = 8,
    EDGERT__FLAG_NEAR_HIT = 16
};

enum { EDGERT__BEGINS = 1, EDGERT__LIVES };

/* A decoded header, and the places of its frame's parts in the buffer. */
typedef struct edgert__frame {
    unsigned kind, flags, status, tensors;
    uint64_t request_id, body_bytes;
    uint32_t model_id, arg, meta_bytes;
    uint32_t stage_us[6];
    unsigned char *meta;
    size_t size;
} edgert__frame;

struct edgert_client {
    int fd;                 /* -1 while not connected */
    uint32_t timeout_ms;    /* for requests without their own time-out */
    int64_t kernel_wait_ms; /* the present time-out of the socket */
    uint64_t request_id;
    uint32_t model_id;
    char *name; /* the name of the model */
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
    unsigned char *memory, *buffer; /* `buffer` is the first multiple of 64 in `memory` */
    size_t capacity, filled, taken; /* of `buffer`: size, received bytes, bytes of the last frame */
    unsigned char *shared;          /* memory shared with the daemon; NULL for none. The client writes the first half */
    size_t half;                    /* bytes of each half */
    int greeted;                    /* whether the first bytes, with the shared memory, have arrived */
    int session;                    /* 0 for no session; else EDGERT__BEGINS, then EDGERT__LIVES */
    int moved;                      /* whether the session continues in another worker */
    unsigned char *resume;          /* the frame with the session's memory for that worker, or NULL */
    size_t resume_bytes;
    char *text;                     /* WELCOME's JSON, with the strings of `model` */
    const char **labels;
    edgert_model model;
    edgert_spec inputs[EDGERT_TENSORS_MAX], outputs[EDGERT_TENSORS_MAX], preprocess, files;
    edgert_tensor results[EDGERT_TENSORS_MAX];
};

/* --- errors and datatypes ---------------------------------------------------------------------------------- */

static int edgert__fail(edgert_error *error, int code, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

static int edgert__fail(edgert_error *error, int code, const char *format, ...) {
    va_list values;
    error->code = code;
    error->retryable = code >= EDGERT_UNAVAILABLE && code <= EDGERT_SHUTTING_DOWN;
    error->retry_after_ms = 0;
    va_start(values, format);
    (void)vsnprintf(error->message, sizeof error->message, format, values);
    va_end(values);
    return code;
}

static void edgert__clear(edgert_error *error) {
    error->code = EDGERT_OK;
    error->retryable = 0;
    error->retry_after_ms = 0;
    error->message[0] = 0;
}

const char *edgert_code_name(int code) {
    switch (code) {
    case EDGERT_OK: return "ok";
    case EDGERT_INVALID: return "request.invalid";
    case EDGERT_PROTOCOL: return "request.protocol";
    case EDGERT_MODEL_NOT_FOUND: return "request.model_not_found";
    case EDGERT_DEADLINE_EXCEEDED: return "request.deadline_exceeded";
    case EDGERT_NOT_ALLOWED: return "request.not_allowed";
    case EDGERT_SESSION_LOST: return "request.session_lost";
    case EDGERT_UNAVAILABLE: return "unavailable";
    case EDGERT_OVERLOADED: return "unavailable.overloaded";
    case EDGERT_WORKER_LOST: return "unavailable.worker_lost";
    case EDGERT_UNREACHABLE: return "unavailable.daemon";
    case EDGERT_SHUTTING_DOWN: return "unavailable.shutting_down";
    case EDGERT_ENGINE_FAILED: return "device.engine_failed";
    case EDGERT_OUT_OF_MEMORY: return "client.out_of_memory";
    default: return "internal";
    }
}

static const struct {
    const char *name;
    size_t bytes;
} edgert__datatypes[] = {
    {"", 0},      {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4}, {"UINT64", 8}, {"INT8", 1},
    {"INT16", 2}, {"INT32", 4}, {"INT64", 8}, {"FP16", 2},   {"FP32", 4},   {"FP64", 8}};

size_t edgert_datatype_bytes(int datatype) {
    return datatype >= EDGERT_BOOL && datatype <= EDGERT_FP64 ? edgert__datatypes[datatype].bytes : 0;
}

const char *edgert_datatype_name(int datatype) {
    return datatype >= EDGERT_BOOL && datatype <= EDGERT_FP64 ? edgert__datatypes[datatype].name : "";
}

static int edgert__datatype_of(const char *name) {
    int datatype;
    for (datatype = EDGERT_BOOL; datatype <= EDGERT_FP64; datatype++)
        if (!strcmp(name, edgert__datatypes[datatype].name)) return datatype;
    return 0;
}

/* Return the bytes of a tensor, or UINT64_MAX if they are too many for any frame. */
static uint64_t edgert__tensor_bytes(int datatype, const uint32_t *shape, int rank) {
    uint64_t bytes = edgert_datatype_bytes(datatype);
    int i;
    for (i = 0; i < rank; i++)
        if (!shape[i]) return 0;
    for (i = 0; i < rank; i++) {
        if (bytes > ((uint64_t)1 << 62) / shape[i]) return UINT64_MAX;
        bytes *= shape[i];
    }
    return bytes;
}

int edgert_tensor_set(edgert_tensor *tensor, int datatype, const uint32_t *shape, int rank, const void *data) {
    uint64_t bytes;
    memset(tensor, 0, sizeof *tensor);
    if (!edgert_datatype_bytes(datatype) || rank < 0 || rank > EDGERT_RANK_MAX || (rank && !shape)) return EDGERT_INVALID;
    bytes = edgert__tensor_bytes(datatype, shape, rank);
    if (bytes > SIZE_MAX / 2) return EDGERT_INVALID; /* no object of a program is this large */
    if (rank) memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
    tensor->datatype = datatype;
    tensor->rank = rank;
    tensor->data = data;
    tensor->bytes = (size_t)bytes;
    return EDGERT_OK;
}

/* --- numbers and frames ------------------------------------------------------------------------------------ */

static void edgert__put(unsigned char *at, int bytes, uint64_t value) {
    int i;
    for (i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t edgert__get(const unsigned char *at, int bytes) {
    uint64_t value = 0;
    int i;
    for (i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static uint64_t edgert__padded(uint64_t bytes) { return (bytes + 63) & ~(uint64_t)63; }

static void edgert__put_header(unsigned char *at, const edgert__frame *frame) {
    memset(at, 0, 64);
    memcpy(at, "ERT1", 4);
    edgert__put(at + 4, 1, 1);
    edgert__put(at + 5, 1, frame->kind);
    edgert__put(at + 6, 2, frame->flags);
    edgert__put(at + 8, 8, frame->request_id);
    edgert__put(at + 16, 4, frame->model_id);
    edgert__put(at + 20, 4, frame->arg);
    edgert__put(at + 24, 4, frame->meta_bytes);
    edgert__put(at + 28, 2, frame->tensors);
    edgert__put(at + 30, 2, frame->status);
    edgert__put(at + 32, 8, frame->body_bytes);
}

/* Decode and check the header at `at`. Returns NULL, or the error. */
static const char *edgert__get_header(const unsigned char *at, edgert__frame *frame) {
    int i;
    frame->kind = at[5];
    frame->flags = (unsigned)edgert__get(at + 6, 2);
    frame->request_id = edgert__get(at + 8, 8);
    frame->model_id = (uint32_t)edgert__get(at + 16, 4);
    frame->arg = (uint32_t)edgert__get(at + 20, 4);
    frame->meta_bytes = (uint32_t)edgert__get(at + 24, 4);
    frame->tensors = (unsigned)edgert__get(at + 28, 2);
    frame->status = (unsigned)edgert__get(at + 30, 2);
    frame->body_bytes = edgert__get(at + 32, 8);
    for (i = 0; i < 6; i++) frame->stage_us[i] = (uint32_t)edgert__get(at + 40 + 4 * i, 4);
    if (memcmp(at, "ERT1", 4)) return "the frame does not start with ERT1";
    if (at[4] != 1) return "the frame is not of version 1";
    if (frame->kind < EDGERT__HELLO || frame->kind > EDGERT__RESUME) return "the frame's kind is not known";
    if (frame->body_bytes > EDGERT_FRAME_BYTES_MAX - 64) return "the frame is longer than EDGERT_FRAME_BYTES_MAX";
    if (frame->meta_bytes > EDGERT__META_BYTES_MAX || frame->tensors > EDGERT_TENSORS_MAX)
        return "the frame has more meta or tensors than allowed";
    if (edgert__padded(frame->meta_bytes) + 64 * frame->tensors > frame->body_bytes)
        return "the header's lengths contradict each other";
    frame->size = (size_t)(64 + frame->body_bytes);
    return NULL;
}

static void edgert__put_descriptor(unsigned char *at, unsigned number, const edgert_tensor *tensor) {
    int i;
    memset(at, 0, 64);
    at[0] = (unsigned char)number;
    at[1] = (unsigned char)tensor->datatype;
    at[2] = (unsigned char)tensor->rank;
    edgert__put(at + 8, 8, tensor->bytes);
    for (i = 0; i < tensor->rank; i++) edgert__put(at + 16 + 4 * i, 4, tensor->shape[i]);
}

/* Decode the tensors of the whole frame at `at`, and their numbers. Returns NULL, or the error. */
static const char *edgert__get_tensors(const unsigned char *at, const edgert__frame *frame, edgert_tensor *tensors,
                                       unsigned *numbers) {
    const unsigned char *described = at + 64 + edgert__padded(frame->meta_bytes);
    const unsigned char *data = described + 64 * frame->tensors;
    const unsigned char *end = at + frame->size;
    unsigned i;
    int k;
    for (i = 0; i < frame->tensors; i++, described += 64) {
        edgert_tensor *tensor = &tensors[i];
        uint64_t bytes = edgert__get(described + 8, 8);
        memset(tensor, 0, sizeof *tensor);
        numbers[i] = described[0];
        tensor->datatype = described[1];
        tensor->rank = described[2];
        if (!edgert_datatype_bytes(tensor->datatype) || tensor->rank > EDGERT_RANK_MAX)
            return "a tensor's datatype or rank is not known";
        for (k = 0; k < tensor->rank; k++) tensor->shape[k] = (uint32_t)edgert__get(described + 16 + 4 * k, 4);
        if (edgert__tensor_bytes(tensor->datatype, tensor->shape, tensor->rank) != bytes)
            return "a tensor's bytes do not match its shape";
        if (bytes > (uint64_t)(end - data) || edgert__padded(bytes) > (uint64_t)(end - data))
            return "a tensor reaches beyond its frame";
        tensor->data = data;
        tensor->bytes = (size_t)bytes;
        data += edgert__padded(bytes);
    }
    return data == end ? NULL : "the frame's body is longer than its parts";
}

/* --- JSON: only what the protocol needs; the bytes may be anything ------------------------------------------- */

/* The text from `at` to `end`. Strings are decoded in place: they only get shorter. */
typedef struct edgert__json {
    char *at, *end;
} edgert__json;

static void edgert__json_space(edgert__json *json) {
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
        json->at++;
}

static int edgert__json_next(edgert__json *json, char wanted) {
    edgert__json_space(json);
    if (json->at == json->end || *json->at != wanted) return 0;
    json->at++;
    return 1;
}

static int edgert__json_hex4(const char *at, const char *end, uint32_t *value) {
    int i;
    if (end - at < 4) return 0;
    for (*value = 0, i = 0; i < 4; i++) {
        char c = at[i];
        unsigned digit;
        if (c >= '0' && c <= '9') digit = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (unsigned)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') digit = (unsigned)(c - 'A' + 10);
        else return 0;
        *value = *value * 16 + digit;
    }
    return 1;
}

static char *edgert__json_utf8(char *out, uint32_t point) {
    if (point < 0x80) {
        *out++ = (char)point;
    } else if (point < 0x800) {
        *out++ = (char)(0xC0 | (point >> 6));
        *out++ = (char)(0x80 | (point & 63));
    } else if (point < 0x10000) {
        *out++ = (char)(0xE0 | (point >> 12));
        *out++ = (char)(0x80 | ((point >> 6) & 63));
        *out++ = (char)(0x80 | (point & 63));
    } else {
        *out++ = (char)(0xF0 | (point >> 18));
        *out++ = (char)(0x80 | ((point >> 12) & 63));
        *out++ = (char)(0x80 | ((point >> 6) & 63));
        *out++ = (char)(0x80 | (point & 63));
    }
    return out;
}

/* Decode a \u escape with its four digits at json->at, and the second half of a pair; a lone half is U+FFFD. */
static int edgert__json_escape(edgert__json *json, char **out) {
    uint32_t point, low;
    if (!edgert__json_hex4(json->at, json->end, &point) || !point) return 0; /* a NUL would end the string */
    json->at += 4;
    if (point >= 0xD800 && point <= 0xDFFF) {
        if (point < 0xDC00 && json->end - json->at >= 6 && json->at[0] == '\\' && json->at[1] == 'u' &&
            edgert__json_hex4(json->at + 2, json->end, &low) && low >= 0xDC00 && low <= 0xDFFF) {
            json->at += 6;
            point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
        } else {
            point = 0xFFFD;
        }
    }
    *out = edgert__json_utf8(*out, point);
    return 1;
}

/* Decode a string in place, and end it with a NUL. */
static int edgert__json_string(edgert__json *json, char **value) {
    static const char escapes[] = "\"\"\\\\//b\bf\fn\nr\rt\t";
    char *out;
    if (!edgert__json_next(json, '"')) return 0;
    *value = out = json->at;
    while (json->at < json->end) {
        char c = *json->at++;
        if (c == '"') {
            *out = 0;
            return 1;
        }
        if ((unsigned char)c < 0x20) return 0;
        if (c != '\\') {
            *out++ = c;
            continue;
        }
        if (json->at == json->end) return 0;
        c = *json->at++;
        if (c == 'u') {
            if (!edgert__json_escape(json, &out)) return 0;
        } else {
            size_t i;
            for (i = 0; i + 1 < sizeof escapes - 1 && escapes[i] != c; i += 2) {}
            if (i + 1 >= sizeof escapes - 1) return 0;
            *out++ = escapes[i + 1];
        }
    }
    return 0;
}

/* Read a whole number of at most 18 digits. */
static int edgert__json_integer(edgert__json *json, int64_t *value) {
    int negative = edgert__json_next(json, '-');
    int digits = 0;
    for (*value = 0; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
        if (++digits > 18) return 0;
        *value = *value * 10 + (*json->at - '0');
    }
    if (negative) *value = -*value;
    return digits && (json->at == json->end || !strchr(".eE", *json->at) || !*json->at);
}

static int edgert__json_word(edgert__json *json, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(json->end - json->at) < length || memcmp(json->at, word, length)) return 0;
    json->at += length;
    return 1;
}

/* Skip any value without changing it, so that it can be read again. */
static int edgert__json_skip(edgert__json *json, int depth) {
    if (depth > EDGERT__JSON_DEPTH_MAX) return 0;
    if (edgert__json_next(json, '"')) {
        while (json->at < json->end) {
            char c = *json->at++;
            if (c == '"') return 1;
            if ((unsigned char)c < 0x20 || (c == '\\' && json->at == json->end)) return 0;
            if (c == '\\') json->at++;
        }
        return 0;
    }
    if (edgert__json_next(json, '[')) {
        if (edgert__json_next(json, ']')) return 1;
        do {
            if (!edgert__json_skip(json, depth + 1)) return 0;
        } while (edgert__json_next(json, ','));
        return edgert__json_next(json, ']');
    }
    if (edgert__json_next(json, '{')) {
        if (edgert__json_next(json, '}')) return 1;
        do {
            if (!edgert__json_next(json, '"')) return 0;
            json->at--;
            if (!edgert__json_skip(json, depth + 1) || !edgert__json_next(json, ':')) return 0;
            if (!edgert__json_skip(json, depth + 1)) return 0;
        } while (edgert__json_next(json, ','));
        return edgert__json_next(json, '}');
    }
    if (edgert__json_word(json, "true") || edgert__json_word(json, "false") || edgert__json_word(json, "null"))
        return 1;
    {
        const char *began = json->at;
        while (json->at < json->end && *json->at && strchr("+-.0123456789eE", *json->at)) json->at++;
        return json->at > began;
    }
}

/* Read the next key of an object and its colon; *first is 1 before the first key. Returns 0 at the end (*bad is
 * 0), or if the text is not JSON. */
static int edgert__json_key(edgert__json *json, int *first, char **key, int *bad) {
    *bad = 0;
    if (edgert__json_next(json, '}')) return 0;
    if (!*first && !edgert__json_next(json, ',')) {
        *bad = 1;
        return 0;
    }
    *first = 0;
    *bad = !edgert__json_string(json, key) || !edgert__json_next(json, ':');
    return !*bad;
}

static int edgert__json_shape(edgert__json *json, edgert_spec *spec) {
    spec->rank = 0;
    if (!edgert__json_next(json, '[')) return 0;
    if (edgert__json_next(json, ']')) return 1;
    do {
        edgert__json_space(json);
        if (spec->rank == EDGERT_RANK_MAX || !edgert__json_integer(json, &spec->shape[spec->rank])) return 0;
        if (spec->shape[spec->rank] < -1 || spec->shape[spec->rank] > (int64_t)UINT32_MAX) return 0;
        spec->rank++;
    } while (edgert__json_next(json, ','));
    return edgert__json_next(json, ']');
}

/* Read {"name": ..., "datatype": ..., "shape": [...]}. */
static int edgert__json_spec(edgert__json *json, edgert_spec *spec) {
    int first = 1, bad = 0, shaped = 0;
    char *key, *word;
    memset(spec, 0, sizeof *spec);
    if (!edgert__json_next(json, '{')) return 0;
    while (edgert__json_key(json, &first, &key, &bad)) {
        if (!strcmp(key, "name")) {
            if (!edgert__json_string(json, &word)) return 0;
            spec->name = word;
        } else if (!strcmp(key, "datatype")) {
            if (!edgert__json_string(json, &word)) return 0;
            spec->datatype = edgert__datatype_of(word);
        } else if (!strcmp(key, "shape")) {
            if (!edgert__json_shape(json, spec)) return 0;
            shaped = 1;
        } else if (!edgert__json_skip(json, 0)) {
            return 0;
        }
    }
    return !bad && shaped && spec->name && spec->datatype;
}

static int edgert__json_specs(edgert__json *json, edgert_spec *specs, size_t *count) {
    *count = 0;
    if (!edgert__json_next(json, '[')) return 0;
    if (edgert__json_next(json, ']')) return 1;
    do {
        if (*count == EDGERT_TENSORS_MAX || !edgert__json_spec(json, &specs[*count])) return 0;
        ++*count;
    } while (edgert__json_next(json, ','));
    return edgert__json_next(json, ']');
}

/* Read {"input": spec, "files": spec}; both are optional. */
static int edgert__json_preprocess(edgert__json *json, edgert_client *client) {
    int first = 1, bad = 0;
    char *key;
    if (!edgert__json_next(json, '{')) return 0;
    while (edgert__json_key(json, &first, &key, &bad)) {
        if (!strcmp(key, "input")) {
            if (!edgert__json_spec(json, &client->preprocess)) return 0;
            client->model.preprocess = &client->preprocess;
        } else if (!strcmp(key, "files")) {
            if (!edgert__json_spec(json, &client->files)) return 0;
            client->model.files = &client->files;
        } else if (!edgert__json_skip(json, 0)) {
            return 0;
        }
    }
    return !bad;
}

/* Read a list of strings: count them first, to allocate exactly their pointers. Also returns 0 if memory is short. */
static int edgert__json_labels(edgert__json *json, const char ***labels, size_t *count) {
    edgert__json ahead;
    size_t commas = 0, i = 0;
    char *word;
    EDGERT_FREE((void *)*labels);
    *labels = NULL;
    *count = 0;
    if (!edgert__json_next(json, '[')) return 0;
    if (edgert__json_next(json, ']')) return 1;
    ahead = *json;
    do {
        if (!edgert__json_skip(&ahead, 0)) return 0;
        commas++;
    } while (edgert__json_next(&ahead, ','));
    *labels = (const char **)EDGERT_MALLOC(commas * sizeof **labels);
    if (!*labels) return 0;
    do {
        if (i == commas || !edgert__json_string(json, &word)) return 0;
        (*labels)[i++] = word;
    } while (edgert__json_next(json, ','));
    *count = i;
    return edgert__json_next(json, ']');
}

/* Read WELCOME's meta, which is in client->text, into client->model. */
static int edgert__read_welcome(edgert_client *client, size_t length) {
    edgert__json json;
    edgert_model *model = &client->model;
    int first = 1, bad = 0, seen = 0;
    int64_t number;
    char *key, *word;
    memset(model, 0, sizeof *model);
    model->inputs = client->inputs;
    model->outputs = client->outputs;
    model->name = client->name;
    model->engine = "";
    json.at = client->text;
    json.end = client->text + length;
    if (!edgert__json_next(&json, '{')) return 0;
    while (edgert__json_key(&json, &first, &key, &bad)) {
        int fine = 1;
        edgert__json_space(&json);
        if (!strcmp(key, "model")) {
            if ((fine = edgert__json_string(&json, &word))) model->name = word;
        } else if (!strcmp(key, "engine")) {
            if ((fine = edgert__json_string(&json, &word))) model->engine = word;
        } else if (!strcmp(key, "release")) {
            fine = edgert__json_integer(&json, &model->release);
        } else if (!strcmp(key, "frame_bytes_max")) {
            fine = edgert__json_integer(&json, &number) && number > 0;
            model->frame_bytes_max = fine ? (uint64_t)number : 0;
        } else if (!strcmp(key, "inputs")) {
            fine = edgert__json_specs(&json, client->inputs, &model->input_count);
            seen |= 1;
        } else if (!strcmp(key, "outputs")) {
            fine = edgert__json_specs(&json, client->outputs, &model->output_count);
            seen |= 2;
        } else if (!strcmp(key, "preprocess")) {
            fine = edgert__json_preprocess(&json, client);
        } else if (!strcmp(key, "labels")) {
            fine = edgert__json_labels(&json, &client->labels, &model->label_count);
            model->labels = client->labels;
        } else {
            fine = edgert__json_skip(&json, 0);
        }
        if (!fine) return 0;
    }
    if (!model->frame_bytes_max) model->frame_bytes_max = EDGERT_FRAME_BYTES_MAX;
    edgert__json_space(&json);
    return !bad && seen == 3 && json.at == json.end;
}

static int edgert__known(unsigned status) {
    switch (status) {
    case EDGERT_INVALID: case EDGERT_PROTOCOL: case EDGERT_MODEL_NOT_FOUND: case EDGERT_DEADLINE_EXCEEDED:
    case EDGERT_NOT_ALLOWED: case EDGERT_SESSION_LOST: case EDGERT_UNAVAILABLE: case EDGERT_OVERLOADED:
    case EDGERT_WORKER_LOST: case EDGERT_UNREACHABLE: case EDGERT_SHUTTING_DOWN: case EDGERT_ENGINE_FAILED:
        return (int)status;
    default: return EDGERT_INTERNAL;
    }
}

/* Read an ERROR frame; this changes its meta. */
static int edgert__read_error(const edgert__frame *frame, edgert_error *error) {
    edgert__json json;
    int first = 1, bad = 0, fine = 1;
    char *key, *message = NULL;
    int retryable = -1;
    json.at = (char *)frame->meta;
    json.end = json.at + frame->meta_bytes;
    if (edgert__json_next(&json, '{')) {
        while (fine && edgert__json_key(&json, &first, &key, &bad)) {
            edgert__json_space(&json);
            if (!strcmp(key, "message")) fine = edgert__json_string(&json, &message);
            else if (!strcmp(key, "retryable") && edgert__json_word(&json, "true")) retryable = 1;
            else if (!strcmp(key, "retryable") && edgert__json_word(&json, "false")) retryable = 0;
            else fine = edgert__json_skip(&json, 0);
            if (!fine) message = NULL;
        }
    }
    (void)edgert__fail(error, edgert__known(frame->status), "%s", message ? message : "the daemon gave no reason");
    if (message && strlen(message) >= sizeof error->message) { /* cut between characters */
        size_t at = sizeof error->message - 1;
        while (at && ((unsigned char)message[at] & 0xC0) == 0x80) at--;
        error->message[at] = 0;
    }
    if (retryable >= 0) error->retryable = retryable;
    error->retry_after_ms = frame->arg;
    return error->code;
}

/* --- the socket -------------------------------------------------------------------------------------------- */

static int64_t edgert__now_us(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* --- memory shared with the daemon --------------------------------------------------------------------------- */

#ifdef EDGERT__SHARES
static void edgert__unmap(edgert_client *client) {
    if (client->shared) (void)munmap(client->shared, 2 * client->half);
    client->shared = NULL;
    client->half = 0;
}

/* Map the memory of `descriptor` if it is sealed against any change of its size; close `descriptor`. */
static void edgert__map(edgert_client *client, int descriptor) {
    struct stat about;
    int seals = fcntl(descriptor, EDGERT__GET_SEALS);
    if (seals >= 0 && (seals & EDGERT__SEALS) == EDGERT__SEALS && !fstat(descriptor, &about) && about.st_size >= 256) {
        size_t half = (size_t)about.st_size / 2;
        void *memory = mmap(NULL, 2 * half, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (memory != MAP_FAILED) {
            client->shared = (unsigned char *)memory;
            client->half = half;
        }
    }
    (void)close(descriptor);
}

/* Like recv, for the connection's first bytes, which may come with the daemon's shared memory. */
static ssize_t edgert__receive_first(edgert_client *client, unsigned char *out, size_t size) {
    union {
        struct cmsghdr header; /* aligns it */
        unsigned char bytes[256];
    } attached;
    struct msghdr message;
    struct cmsghdr *item;
    struct iovec part;
    ssize_t got;
    memset(&message, 0, sizeof message);
    part.iov_base = out;
    part.iov_len = size;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = attached.bytes;
    message.msg_controllen = sizeof attached.bytes;
    got = recvmsg(client->fd, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) return got;
    client->greeted = 1;
    for (item = CMSG_FIRSTHDR(&message); item; item = CMSG_NXTHDR(&message, item)) {
        size_t at;
        if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
        for (at = CMSG_LEN(0); at + sizeof(int) <= item->cmsg_len; at += sizeof(int)) {
            int descriptor;
            memcpy(&descriptor, (unsigned char *)item + at, sizeof descriptor);
            if (client->shared) (void)close(descriptor);
            else edgert__map(client, descriptor);
        }
    }
    return got;
}

/* Copy the body of the frame in `parts` to this end's half of the shared memory, if it fits and is large enough. Then
 * only the header is sent. Returns the number of parts to send. */
static size_t edgert__share(edgert_client *client, struct iovec *parts, size_t count, const edgert__frame *frame) {
    unsigned char *head = (unsigned char *)parts[0].iov_base, *at;
    size_t i;
    if (!client->shared || frame->body_bytes + 64 < EDGERT_SHARE_BYTES_MIN || frame->body_bytes + 64 > client->half)
        return count;
    at = client->shared + 64;
    memcpy(at, head + 64, parts[0].iov_len - 64);
    at += parts[0].iov_len - 64;
    for (i = 1; i < count; at += parts[i++].iov_len) memcpy(at, parts[i].iov_base, parts[i].iov_len);
    edgert__put(head + 6, 2, frame->flags | EDGERT__FLAG_SHARED);
    parts[0].iov_len = 64;
    return 1;
}
#else
static void edgert__unmap(edgert_client *client) { (void)client; }

static ssize_t edgert__receive_first(edgert_client *client, unsigned char *out, size_t size) {
    client->greeted = 1;
    return recv(client->fd, out, size, 0);
}

static size_t edgert__share(edgert_client *client, struct iovec *parts, size_t count, const edgert__frame *frame) {
    (void)client;
    (void)parts;
    (void)frame;
    return count;
}
#endif

/* --- the connection ------------------------------------------------------------------------------------------ */

static int64_t edgert__deadline_us(const edgert_client *client, uint32_t timeout_ms) {
    return edgert__now_us() + (int64_t)(timeout_ms ? timeout_ms : client->timeout_ms) * 1000;
}

static void edgert__hang_up(edgert_client *client) {
    if (client->fd >= 0) (void)close(client->fd);
    client->fd = -1;
    edgert__unmap(client);
    client->greeted = 0;
    client->filled = client->taken = 0;
    client->kernel_wait_ms = -1;
}

/* Let the kernel limit each call, which is cheaper than a poll. Requests with the same time-out set it only once. */
static int edgert__bound(edgert_client *client, int64_t deadline_us) {
    int64_t left_ms = (deadline_us - edgert__now_us() + 999) / 1000;
    struct timeval value;
    if (left_ms <= 0) return 0;
    if (left_ms == client->kernel_wait_ms) return 1;
    memset(&value, 0, sizeof value);
    value.tv_sec = (time_t)(left_ms / 1000);
    value.tv_usec = (suseconds_t)(left_ms % 1000 * 1000);
    (void)setsockopt(client->fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
    (void)setsockopt(client->fd, SOL_SOCKET, SO_SNDTIMEO, &value, sizeof value);
    client->kernel_wait_ms = left_ms;
    return 1;
}

static int edgert__late(edgert_error *error, const char *what) {
    return edgert__fail(error, EDGERT_DEADLINE_EXCEEDED, "%s; give a longer time-out or check edgertd status", what);
}

/* Send every byte of `parts`. Returns EDGERT_OK, a code, or EDGERT__AGAIN if the daemon closed too early. */
static int edgert__send(edgert_client *client, struct iovec *parts, size_t count, int64_t deadline_us,
                        edgert_error *error) {
    while (count) {
        struct msghdr message;
        ssize_t sent;
        if (!edgert__bound(client, deadline_us))
            return edgert__late(error, "the daemon did not take the request in time");
        memset(&message, 0, sizeof message);
        message.msg_iov = parts;
        message.msg_iovlen = (unsigned char)count; /* at most 65; an int or a size_t, by the C library */
        sent = sendmsg(client->fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue; /* edgert__bound checks the deadline */
        if (sent < 0) return EDGERT__AGAIN;
        while (count && (size_t)sent >= parts->iov_len) {
            sent -= (ssize_t)parts->iov_len;
            parts++;
            count--;
        }
        if (count) {
            parts->iov_base = (char *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
    return EDGERT_OK;
}

/* Make `buffer` at least `size` bytes long. */
static int edgert__make_room(edgert_client *client, size_t size) {
    unsigned char *memory, *buffer;
    if (size <= client->capacity) return 1;
    memory = (unsigned char *)EDGERT_MALLOC(size + 63);
    if (!memory) return 0;
    buffer = memory + (64 - (uintptr_t)memory % 64) % 64;
    if (client->filled) memcpy(buffer, client->buffer, client->filled);
    EDGERT_FREE(client->memory);
    client->memory = memory;
    client->buffer = buffer;
    client->capacity = size;
    return 1;
}

/* Receive the next frame to the start of the buffer. Returns EDGERT_WORKER_LOST if the connection ends. */
static int edgert__receive(edgert_client *client, edgert__frame *frame, int64_t deadline_us, edgert_error *error) {
    size_t rest = client->filled - client->taken;
    if (rest && client->taken) memmove(client->buffer, client->buffer + client->taken, rest);
    client->filled = rest;
    client->taken = 0;
    for (;;) {
        ssize_t got;
        if (client->filled >= 64) {
            const char *wrong = edgert__get_header(client->buffer, frame);
            if (wrong) return edgert__fail(error, EDGERT_PROTOCOL, "the daemon's answer: %s", wrong);
            if (!edgert__make_room(client, frame->size))
                return edgert__fail(error, EDGERT_OUT_OF_MEMORY, "no memory for an answer of %lu bytes",
                                    (unsigned long)frame->size);
            if (frame->flags & EDGERT__FLAG_SHARED) {
                /* Copy the body before any check. Bytes after the header, such as a MOVED, go behind the body. */
                size_t more = client->filled - 64;
                if (!client->shared || frame->size > client->half)
                    return edgert__fail(error, EDGERT_PROTOCOL,
                                        "the daemon's answer: a frame in shared memory that does not exist");
                if (!edgert__make_room(client, frame->size + more))
                    return edgert__fail(error, EDGERT_OUT_OF_MEMORY, "no memory for an answer of %lu bytes",
                                        (unsigned long)frame->size);
                memmove(client->buffer + frame->size, client->buffer + 64, more);
                memcpy(client->buffer + 64, client->shared + client->half + 64, frame->size - 64);
                client->filled = frame->size + more;
            }
            if (client->filled >= frame->size) {
                frame->meta = client->buffer + 64;
                client->taken = frame->size;
                return EDGERT_OK;
            }
        }
        if (!edgert__bound(client, deadline_us)) return edgert__late(error, "no answer arrived in time");
        got = client->greeted
                  ? recv(client->fd, client->buffer + client->filled, client->capacity - client->filled, 0)
                  : edgert__receive_first(client, client->buffer + client->filled, client->capacity - client->filled);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got < 0)
            return edgert__fail(error, EDGERT_WORKER_LOST,
                                "the daemon closed the connection during the request: %s; send it again",
                                strerror(errno));
        if (!got)
            return edgert__fail(error, EDGERT_WORKER_LOST,
                                "the model's worker ended during the request; send it again");
        client->filled += (size_t)got;
    }
}

/* Write {"model": name}, with "shared": true if memory may be shared and "session": true for a session, as a frame of
 * at most 64 + EDGERT__HELLO_BYTES_MAX bytes. Returns its size, or 0 if the name is too long. */
static size_t edgert__hello(unsigned char *out, const char *name, int shared, int session) {
    static const char hex[] = "0123456789abcdef";
    unsigned char *at = out + 64, *end = out + 64 + EDGERT__HELLO_BYTES_MAX;
    edgert__frame frame;
    memset(&frame, 0, sizeof frame);
    memset(out, 0, 64 + EDGERT__HELLO_BYTES_MAX);
    memcpy(at, "{\"model\":\"", 10);
    for (at += 10; *name; name++) {
        unsigned char c = (unsigned char)*name;
        if (end - at < 40) return 0;
        if (c < 0x20) {
            memcpy(at, "\\u00", 4);
            at[4] = (unsigned char)hex[c >> 4];
            at[5] = (unsigned char)hex[c & 15];
            at += 6;
        } else {
            if (c == '"' || c == '\\') *at++ = '\\';
            *at++ = c;
        }
    }
    *at++ = '"';
    if (shared) {
        memcpy(at, ",\"shared\":true", 14);
        at += 14;
    }
    if (session) {
        memcpy(at, ",\"session\":true", 15);
        at += 15;
    }
    *at++ = '}';
    frame.kind = EDGERT__HELLO;
    frame.meta_bytes = (uint32_t)(at - (out + 64));
    frame.body_bytes = edgert__padded(frame.meta_bytes);
    edgert__put_header(out, &frame);
    return (size_t)(64 + frame.body_bytes);
}

static int edgert__dial(edgert_client *client, int64_t deadline_us, edgert_error *error) {
    static const int send_buffer_bytes = EDGERT__SEND_BUFFER_BYTES;
    struct sockaddr_un address;
    const char *path = client->path;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path, sizeof client->path);
    client->fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (client->fd < 0) return edgert__fail(error, EDGERT_UNREACHABLE, "cannot make a socket: %s", strerror(errno));
    (void)fcntl(client->fd, F_SETFD, FD_CLOEXEC);
    (void)setsockopt(client->fd, SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof send_buffer_bytes);
    do {
        if (!edgert__bound(client, deadline_us))
            return edgert__late(error, "the daemon did not accept the connection in time");
        if (!connect(client->fd, (struct sockaddr *)&address, sizeof address)) return EDGERT_OK;
    } while (errno == EINTR || errno == EAGAIN);
    if (errno == ENOENT)
        return edgert__fail(error, EDGERT_UNREACHABLE,
                            "no daemon listens at %s: start it with edgertd start, or give its path", path);
    if (errno == EACCES || errno == EPERM)
        return edgert__fail(error, EDGERT_UNREACHABLE,
                            "no permission for %s: run as its owner or a member of its group", path);
    return edgert__fail(error, EDGERT_UNREACHABLE, "cannot connect to the daemon at %s: %s", path, strerror(errno));
}

/* Connect and read the WELCOME. Returns EDGERT__AGAIN, with the error set, if the daemon says: try later. */
static int edgert__greet(edgert_client *client, int64_t deadline_us, edgert_error *error) {
    unsigned char hello[64 + EDGERT__HELLO_BYTES_MAX];
    edgert__frame frame;
    struct iovec part;
    int code = edgert__dial(client, deadline_us, error);
    if (code) return code;
    part.iov_base = hello;
#ifdef EDGERT__SHARES
    part.iov_len = edgert__hello(hello, client->name, 1, client->session);
#else
    part.iov_len = edgert__hello(hello, client->name, 0, client->session);
#endif
    if (!part.iov_len) return edgert__fail(error, EDGERT_INVALID, "the model's name is longer than a hello may be");
    code = edgert__send(client, &part, 1, deadline_us, error);
    if (code == EDGERT__AGAIN)
        return edgert__fail(error, EDGERT_UNREACHABLE, "the daemon at %s closed the connection", client->path);
    if (!code) code = edgert__receive(client, &frame, deadline_us, error);
    if (code == EDGERT_DEADLINE_EXCEEDED)
        return edgert__fail(error, code,
                            "nothing answered at %s in time: check with edgertd status that this is the daemon's socket, "
                            "or give a longer time-out", client->path);
    if (code == EDGERT_WORKER_LOST || (!code && frame.kind == EDGERT__MOVED)) {
        (void)edgert__fail(error, EDGERT_UNAVAILABLE, "the daemon is restarting this model");
        error->retry_after_ms = EDGERT__RETRY_PAUSE_MS;
        return EDGERT__AGAIN;
    }
    if (code) return code;
    if (frame.kind == EDGERT__ERROR) {
        code = edgert__read_error(&frame, error);
        return error->retryable && error->retry_after_ms ? EDGERT__AGAIN : code;
    }
    EDGERT_FREE(client->text);
    client->text = (char *)EDGERT_MALLOC((size_t)frame.meta_bytes + 1);
    if (!client->text) return edgert__fail(error, EDGERT_OUT_OF_MEMORY, "no memory for the model's description");
    memcpy(client->text, frame.meta, frame.meta_bytes);
    client->text[frame.meta_bytes] = 0;
    if (frame.kind != EDGERT__WELCOME || frame.tensors || !edgert__read_welcome(client, frame.meta_bytes))
        return edgert__fail(error, EDGERT_PROTOCOL,
                            "the daemon's WELCOME does not describe a model as in docs/protocol.md");
    client->model_id = frame.model_id;
    return EDGERT_OK;
}

/* --- requests ---------------------------------------------------------------------------------------------- */

/* Make the buffers of one INFER frame. `head` has 64 bytes for the header and 64 for each input; keep it until the
 * frame is sent. */
static size_t edgert__request_parts(struct iovec *parts, unsigned char *head, edgert__frame *frame,
                                    const edgert_tensor *inputs, size_t count) {
    static unsigned char padding[64];
    size_t used = 1, i;
    frame->tensors = (unsigned)count;
    frame->body_bytes = 64 * count;
    for (i = 0; i < count; i++) {
        size_t bytes = inputs[i].bytes;
        edgert__put_descriptor(head + 64 + 64 * i, (unsigned)i, &inputs[i]);
        frame->body_bytes += edgert__padded(bytes);
        if (!bytes) continue;
        parts[used].iov_base = (void *)(uintptr_t)inputs[i].data; /* sendmsg only reads it */
        parts[used++].iov_len = bytes;
        if (bytes % 64) {
            parts[used].iov_base = padding;
            parts[used++].iov_len = 64 - bytes % 64;
        }
    }
    edgert__put_header(head, frame);
    parts[0].iov_base = head;
    parts[0].iov_len = 64 + 64 * count;
    return used;
}

/* Keep the memory in a MOVED frame as the RESUME frame. If allocation fails, the session is lost. */
static void edgert__keep(edgert_client *client, const edgert__frame *moved) {
    unsigned char *copy = client->session && moved->tensors ? (unsigned char *)EDGERT_MALLOC(moved->size) : NULL;
    client->moved = copy || !moved->tensors;
    if (!copy) return;
    EDGERT_FREE(client->resume);
    client->resume = copy;
    memcpy(client->resume, client->buffer, moved->size);
    client->resume[5] = EDGERT__RESUME;
    client->resume[6] &= (unsigned char)~EDGERT__FLAG_SHARED;
    client->resume_bytes = moved->size;
}

/* Continue or start the session over a connection that was just opened. */
static int edgert__continue(edgert_client *client, int64_t deadline_us, edgert_error *error) {
    struct iovec part;
    int code = EDGERT_OK;
    if (!client->session) return EDGERT_OK;
    client->session = EDGERT__LIVES;
    client->moved = 0;
    if (!client->resume) return EDGERT_OK;
    part.iov_base = client->resume;
    part.iov_len = client->resume_bytes;
    code = edgert__send(client, &part, 1, deadline_us, error);
    return code == EDGERT__AGAIN ? EDGERT_OK : code; /* the next request reports the reason */
}

/* Send one request over the open connection. Returns EDGERT__AGAIN if no engine saw the request. */
static int edgert__ask(edgert_client *client, edgert__frame *request, const edgert_tensor *inputs, size_t count,
                       int64_t deadline_us, edgert__frame *answer, edgert_error *error) {
    unsigned char head[64 + 64 * EDGERT_TENSORS_MAX];
    struct iovec parts[1 + 2 * EDGERT_TENSORS_MAX];
    int64_t left_us = deadline_us - edgert__now_us();
    int code;
    if (left_us <= 0) return edgert__late(error, "the time-out passed before the request was sent");
    request->request_id = ++client->request_id;
    request->model_id = client->model_id;
    if (request->kind == EDGERT__INFER) request->arg = left_us < (int64_t)UINT32_MAX ? (uint32_t)left_us : UINT32_MAX;
    count = edgert__request_parts(parts, head, request, inputs, count);
    if (request->kind == EDGERT__INFER && 64 + request->body_bytes > client->model.frame_bytes_max)
        return edgert__fail(error, EDGERT_INVALID, "the request has %lu bytes, at most %lu are allowed: split it",
                            (unsigned long)(64 + request->body_bytes), (unsigned long)client->model.frame_bytes_max);
    count = edgert__share(client, parts, count, request);
    code = edgert__send(client, parts, count, deadline_us, error);
    if (code == EDGERT__AGAIN) {
        /* The daemon closed before it had the whole request. It may have sent an error. */
        int64_t soon_us = edgert__now_us() + EDGERT__RETRY_PAUSE_MS * 1000;
        code = edgert__receive(client, answer, client->session ? deadline_us : soon_us, error);
        if (!code && answer->kind == EDGERT__MOVED) edgert__keep(client, answer);
        code = !code && answer->kind == EDGERT__ERROR ? edgert__read_error(answer, error) : EDGERT__AGAIN;
        edgert__hang_up(client);
        if (code == EDGERT__AGAIN) edgert__clear(error);
        return code;
    }
    if (!code) code = edgert__receive(client, answer, deadline_us, error);
    if (!code && answer->kind == EDGERT__MOVED) {
        edgert__keep(client, answer);
        edgert__hang_up(client);
        edgert__clear(error);
        return EDGERT__AGAIN;
    }
    if (!code && answer->kind == EDGERT__ERROR) {
        if (answer->request_id == request->request_id) return edgert__read_error(answer, error);
        code = edgert__read_error(answer, error); /* the error is about the connection, which ends */
    } else if (!code && answer->kind == (request->kind == EDGERT__PING ? EDGERT__PONG : EDGERT__RESULT) &&
               answer->request_id == request->request_id) {
        return EDGERT_OK;
    } else if (!code) {
        code = edgert__fail(error, EDGERT_PROTOCOL, "the daemon answered with frame %u", answer->kind);
    }
    edgert__hang_up(client); /* the next request must not receive a late answer */
    return code;
}

/* Wait for the pause that the daemon requested. Returns 0 if the pause would end after the deadline. */
static int edgert__pause(const edgert_error *again, int64_t deadline_us) {
    int64_t wait_us = (int64_t)again->retry_after_ms * 1000;
    struct timespec pause;
    if (again->code == EDGERT_OK) return 1;
    if (edgert__now_us() + wait_us >= deadline_us) return 0;
    pause.tv_sec = (time_t)(wait_us / 1000000);
    pause.tv_nsec = (long)(wait_us % 1000000 * 1000);
    while (nanosleep(&pause, &pause) && errno == EINTR) {}
    return 1;
}

/* Connect if there is no connection; repeat while the daemon says: try later. */
static int edgert__open(edgert_client *client, int64_t deadline_us, edgert_error *error) {
    while (client->fd < 0) {
        int code;
        if (client->session == EDGERT__LIVES && !client->moved)
            return edgert__fail(error, EDGERT_SESSION_LOST,
                                "the connection ended, and the memory of the session is lost: start a new session");
        code = edgert__greet(client, deadline_us, error);
        if (!code) code = edgert__continue(client, deadline_us, error);
        if (code) edgert__hang_up(client);
        if (code == EDGERT__AGAIN && !edgert__pause(error, deadline_us)) return error->code;
        if (code && code != EDGERT__AGAIN) return code;
    }
    return EDGERT_OK;
}

static int edgert__exchange(edgert_client *client, edgert__frame *request, const edgert_tensor *inputs, size_t count,
                            int64_t deadline_us, edgert__frame *answer, edgert_error *error) {
    int code;
    do {
        code = edgert__open(client, deadline_us, error);
        if (!code) code = edgert__ask(client, request, inputs, count, deadline_us, answer, error);
    } while (code == EDGERT__AGAIN);
    if (!code) edgert__clear(error);
    return code;
}

static int edgert__check_inputs(const edgert_client *client, const edgert_tensor *inputs, size_t count,
                                edgert_error *error) {
    const edgert_model *model = &client->model;
    size_t i;
    if (count != model->input_count)
        return edgert__fail(error, EDGERT_INVALID, "model %s takes %lu inputs, got %lu", model->name,
                            (unsigned long)model->input_count, (unsigned long)count);
    for (i = 0; i < count; i++) {
        const edgert_tensor *tensor = &inputs[i];
        if (tensor->name && strcmp(tensor->name, model->inputs[i].name))
            return edgert__fail(error, EDGERT_INVALID, "input %lu of model %s is %s, got %s", (unsigned long)i,
                                model->name, model->inputs[i].name, tensor->name);
        if (!edgert_datatype_bytes(tensor->datatype) || tensor->rank < 0 || tensor->rank > EDGERT_RANK_MAX ||
            edgert__tensor_bytes(tensor->datatype, tensor->shape, tensor->rank) != tensor->bytes ||
            (tensor->bytes && !tensor->data))
            return edgert__fail(error, EDGERT_INVALID,
                                "input %lu has no data, or its bytes do not match its shape: use edgert_tensor_set",
                                (unsigned long)i);
        if (tensor->bytes > model->frame_bytes_max) /* the sum of all inputs is checked when they are sent */
            return edgert__fail(error, EDGERT_INVALID, "input %lu has %lu bytes, at most %lu are allowed: split it",
                                (unsigned long)i, (unsigned long)tensor->bytes, (unsigned long)model->frame_bytes_max);
    }
    return EDGERT_OK;
}

static int edgert__read_result(edgert_client *client, const edgert__frame *answer, edgert_response *response,
                               edgert_error *error) {
    unsigned numbers[EDGERT_TENSORS_MAX], i;
    const char *wrong = edgert__get_tensors(client->buffer, answer, client->results, numbers);
    for (i = 0; !wrong && i < answer->tensors; i++) {
        if (numbers[i] >= client->model.output_count) wrong = "an output that the model does not have";
        else client->results[i].name = client->outputs[numbers[i]].name;
    }
    if (wrong) {
        edgert__hang_up(client);
        return edgert__fail(error, EDGERT_PROTOCOL, "the daemon's answer: %s", wrong);
    }
    response->outputs = client->results;
    response->output_count = answer->tensors;
    response->release = client->model.release;
    response->batch = answer->arg;
    response->cache_hit = (answer->flags & EDGERT__FLAG_CACHE_HIT) != 0;
    response->near_hit = (answer->flags & EDGERT__FLAG_NEAR_HIT) != 0;
    memcpy(response->stage_us, answer->stage_us, sizeof response->stage_us);
    return EDGERT_OK;
}

int edgert_infer(edgert_client *client, const edgert_tensor *inputs, size_t input_count,
                 const edgert_options *options, edgert_response *response, edgert_error *error) {
    edgert_error unwanted;
    edgert__frame request, answer;
    int64_t deadline_us;
    int code;
    if (!error) error = &unwanted;
    if (!client || !response || (input_count && !inputs))
        return edgert__fail(error, EDGERT_INVALID, "edgert_infer got NULL: give it a client, inputs and a response");
    deadline_us = edgert__deadline_us(client, options ? options->timeout_ms : 0);
    memset(response, 0, sizeof *response);
    memset(&request, 0, sizeof request);
    request.kind = EDGERT__INFER;
    if (options && options->no_cache) request.flags |= EDGERT__FLAG_NO_CACHE;
    if (options && options->high_priority) request.flags |= EDGERT__FLAG_HIGH_PRIORITY;
    code = edgert__check_inputs(client, inputs, input_count, error);
    if (!code) code = edgert__exchange(client, &request, inputs, input_count, deadline_us, &answer, error);
    if (code == EDGERT_WORKER_LOST && client->session)
        return edgert__fail(error, EDGERT_SESSION_LOST,
                            "the model's worker ended, and the memory of the session is lost: start a new session");
    return code ? code : edgert__read_result(client, &answer, response, error);
}

int edgert_ping(edgert_client *client, uint32_t timeout_ms, edgert_error *error) {
    edgert_error unwanted;
    edgert__frame request, answer;
    if (!error) error = &unwanted;
    if (!client) return edgert__fail(error, EDGERT_INVALID, "edgert_ping got NULL: give it a client");
    memset(&request, 0, sizeof request);
    request.kind = EDGERT__PING;
    return edgert__exchange(client, &request, NULL, 0, edgert__deadline_us(client, timeout_ms), &answer, error);
}

/* --- opening and closing ----------------------------------------------------------------------------------- */

/* Find the default socket. Returns 0 if its path is too long. */
static int edgert__find_socket(char *out, size_t size, const char *path) {
    /* These are the same places, in the same order, as in `default_socket` of edgert/state_dir.py. */
    const char *folders[4], *ends[4];
    int i, count = 0, length;
    if (!path || !*path) path = getenv("EDGERT_SOCKET");
    if (path && *path) {
        length = snprintf(out, size, "%s", path);
        return length > 0 && (size_t)length < size;
    }
    folders[count] = getenv("EDGERT_STATE"), ends[count++] = "/edgert.sock";
    folders[count] = "/run/edgert", ends[count++] = "/edgert.sock"; /* the system's service */
    folders[count] = "/var/lib/edgert", ends[count++] = "/edgert.sock";
    folders[count] = getenv("HOME"), ends[count++] = "/.local/state/edgert/edgert.sock";
    for (i = 0; i < count; i++) {
        if (!folders[i] || !*folders[i]) continue;
        length = snprintf(out, size, "%s%s", folders[i], ends[i]);
        if (length > 0 && (size_t)length < size && access(out, F_OK) == 0) return 1;
    }
    i = folders[0] && *folders[0] ? 0 : 1; /* no socket exists: the error names the first place */
    length = snprintf(out, size, "%s%s", folders[i], ends[i]);
    return length > 0 && (size_t)length < size;
}

static edgert_client *edgert__client(const char *path, const char *model, uint32_t timeout_ms, int session,
                                     edgert_error *error) {
    edgert_error unwanted;
    edgert_client *client;
    size_t length = model ? strlen(model) : 0;
    if (!error) error = &unwanted;
    edgert__clear(error);
    if (!model) {
        (void)edgert__fail(error, EDGERT_INVALID, "name the model to connect to");
        return NULL;
    }
    client = (edgert_client *)EDGERT_MALLOC(sizeof *client);
    if (client) {
        memset(client, 0, sizeof *client);
        client->fd = -1;
        client->kernel_wait_ms = -1;
        client->session = session;
        client->timeout_ms = timeout_ms ? timeout_ms : EDGERT__TIMEOUT_MS;
        client->name = (char *)EDGERT_MALLOC(length + 1);
    }
    if (!client || !client->name || !edgert__make_room(client, 8192)) {
        (void)edgert__fail(error, EDGERT_OUT_OF_MEMORY, "no memory for a client");
    } else {
        memcpy(client->name, model, length + 1);
        if (!edgert__find_socket(client->path, sizeof client->path, path))
            (void)edgert__fail(error, EDGERT_INVALID, "the socket's path is longer than %lu bytes: give a shorter one",
                               (unsigned long)(sizeof client->path - 1));
        else if (edgert__open(client, edgert__deadline_us(client, 0), error) == EDGERT_OK) {
            edgert__clear(error);
            return client;
        }
    }
    edgert_close(client);
    return NULL;
}

edgert_client *edgert_connect(const char *path, const char *model, uint32_t timeout_ms, edgert_error *error) {
    return edgert__client(path, model, timeout_ms, 0, error);
}

edgert_client *edgert_session(const char *path, const char *model, uint32_t timeout_ms, edgert_error *error) {
    return edgert__client(path, model, timeout_ms, EDGERT__BEGINS, error);
}

const edgert_model *edgert_describe(const edgert_client *client) { return &client->model; }

void edgert_close(edgert_client *client) {
    if (!client) return;
    edgert__hang_up(client);
    EDGERT_FREE(client->memory);
    EDGERT_FREE(client->name);
    EDGERT_FREE(client->resume);
    EDGERT_FREE(client->text);
    EDGERT_FREE((void *)client->labels);
    EDGERT_FREE(client);
}

#ifdef __cplusplus
}
#endif
#endif /* EDGERT_IMPLEMENTATION */
