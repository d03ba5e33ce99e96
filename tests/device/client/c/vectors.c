/* The codec of edgert.h without a socket: a command a line on stdin, a line of JSON on stdout.
 *
 *   decode HEX                                       a frame; text as hex
 *   hello NAME                                       the frame that a client begins with, without shared memory
 *   hello-session NAME                               the same, for a session
 *   hello-shared NAME                                the same, with
 *   infer FLAGS REQUEST_ID MODEL_ID ARG TENSOR...    TENSOR is datatype:rank:dims,...:HEX
 *   share FLAGS REQUEST_ID MODEL_ID ARG TENSOR...    the same through shared memory: the header, and the memory
 *   ping REQUEST_ID
 *   welcome HEX                                      WELCOME's JSON
 */
#define EDGERT_IMPLEMENTATION
#define EDGERT_SHARE_BYTES_MIN 1
#include "edgert.h"

#include <inttypes.h>

static unsigned char *bytes_of(const char *hex, size_t *size) {
    /* Exactly as long as the bytes are, so that a sanitizer sees every step beyond them. */
    unsigned char *bytes = (unsigned char *)malloc(strlen(hex) / 2 + !*hex);
    unsigned value;
    for (*size = 0; sscanf(hex + 2 * *size, "%2x", &value) == 1; ++*size) bytes[*size] = (unsigned char)value;
    return bytes;
}

static void print_hex(const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    size_t i;
    putchar('"');
    for (i = 0; i < size; i++) printf("%02x", bytes[i]);
    putchar('"');
}

static void print_tensors(const edgert__frame *frame, const edgert_tensor *tensors, const unsigned *numbers) {
    unsigned i;
    int k;
    for (i = 0; i < frame->tensors; i++) {
        printf("%s{\"number\": %u, \"datatype\": \"%s\", \"shape\": [", i ? ", " : "", numbers[i],
               edgert_datatype_name(tensors[i].datatype));
        for (k = 0; k < tensors[i].rank; k++) printf("%s%" PRIu32, k ? ", " : "", tensors[i].shape[k]);
        printf("], \"data\": ");
        print_hex(tensors[i].data, tensors[i].bytes);
        printf("}");
    }
}

static void decode(const char *hex) {
    size_t size, i;
    unsigned char *bytes = bytes_of(hex, &size);
    unsigned numbers[EDGERT_TENSORS_MAX];
    edgert_tensor tensors[EDGERT_TENSORS_MAX];
    edgert__frame frame;
    const char *wrong = size < 64 ? NULL : edgert__get_header(bytes, &frame);
    if (!wrong && (size < 64 || size < frame.size)) {
        printf("{\"incomplete\": true}");
    } else if (wrong || (wrong = edgert__get_tensors(bytes, &frame, tensors, numbers)) != NULL) {
        printf("{\"refused\": \"%s\"}", wrong);
    } else {
        printf("{\"kind\": %u, \"flags\": %u, \"request_id\": %" PRIu64 ", \"model_id\": %" PRIu32 ", \"arg\": %" PRIu32
               ", \"status\": %u, \"stages\": [",
               frame.kind, frame.flags, frame.request_id, frame.model_id, frame.arg, frame.status);
        for (i = 0; i < 6; i++) printf("%s%" PRIu32, i ? ", " : "", frame.stage_us[i]);
        printf("], \"meta\": ");
        print_hex(bytes + 64, frame.meta_bytes);
        printf(", \"tensors\": [");
        print_tensors(&frame, tensors, numbers);
        printf("]");
        if (frame.kind == EDGERT__ERROR) {
            edgert_error error;
            frame.meta = bytes + 64;
            (void)edgert__read_error(&frame, &error);
            printf(", \"error\": {\"code\": \"%s\", \"retryable\": %d, \"retry_after_ms\": %" PRIu32 ", \"message\": ",
                   edgert_code_name(error.code), error.retryable, error.retry_after_ms);
            print_hex(error.message, strlen(error.message));
            printf("}");
        }
        printf("}");
    }
    free(bytes);
}

static void print_specs(const edgert_spec *specs, size_t count) {
    size_t i;
    int k;
    for (i = 0; i < count; i++) {
        printf("%s{\"name\": ", i ? ", " : "");
        print_hex(specs[i].name, strlen(specs[i].name));
        printf(", \"datatype\": \"%s\", \"shape\": [", edgert_datatype_name(specs[i].datatype));
        for (k = 0; k < specs[i].rank; k++) printf("%s%" PRId64, k ? ", " : "", specs[i].shape[k]);
        printf("]}");
    }
}

static void welcome(const char *hex) {
    size_t size, i;
    char name[] = "asked for";
    edgert_client client;
    memset(&client, 0, sizeof client);
    client.name = name;
    client.text = (char *)bytes_of(hex, &size);
    if (!edgert__read_welcome(&client, size)) {
        printf("{\"refused\": true}");
    } else {
        const edgert_model *model = &client.model;
        printf("{\"model\": ");
        print_hex(model->name, strlen(model->name));
        printf(", \"engine\": ");
        print_hex(model->engine, strlen(model->engine));
        printf(", \"release\": %" PRId64 ", \"frame_bytes_max\": %" PRIu64 ", \"inputs\": [", model->release,
               model->frame_bytes_max);
        print_specs(model->inputs, model->input_count);
        printf("], \"outputs\": [");
        print_specs(model->outputs, model->output_count);
        printf("], \"preprocess\": [");
        print_specs(model->preprocess, model->preprocess ? 1 : 0);
        printf("], \"files\": [");
        print_specs(model->files, model->files ? 1 : 0);
        printf("], \"labels\": [");
        for (i = 0; i < model->label_count; i++) {
            printf(i ? ", " : "");
            print_hex(model->labels[i], strlen(model->labels[i]));
        }
        printf("]}");
    }
    free((void *)client.labels);
    free(client.text);
}

/* datatype:rank:dims,...:HEX; the data is the caller's to free. */
static void read_tensor(char *word, edgert_tensor *tensor) {
    uint32_t shape[EDGERT_RANK_MAX] = {0};
    int datatype = (int)strtol(word, &word, 10), rank = (int)strtol(word + 1, &word, 10), i;
    size_t size;
    for (word++, i = 0; i < rank; i++) {
        shape[i] = (uint32_t)strtoul(word, &word, 10);
        if (*word == ',') word++;
    }
    if (edgert_tensor_set(tensor, datatype, shape, rank, bytes_of(word + 1, &size)) || tensor->bytes != size) exit(3);
}

static void request(unsigned kind, char *rest, edgert_client *client) {
    unsigned char head[64 + 64 * EDGERT_TENSORS_MAX];
    struct iovec parts[1 + 2 * EDGERT_TENSORS_MAX];
    edgert_tensor tensors[EDGERT_TENSORS_MAX];
    edgert__frame frame;
    size_t count = 0, used, i;
    char *word;
    memset(&frame, 0, sizeof frame);
    frame.kind = kind;
    if (kind == EDGERT__INFER) frame.flags = (unsigned)strtoul(rest, &rest, 10);
    frame.request_id = strtoull(rest, &rest, 10);
    if (kind == EDGERT__INFER) frame.model_id = (uint32_t)strtoul(rest, &rest, 10);
    if (kind == EDGERT__INFER) frame.arg = (uint32_t)strtoul(rest, &rest, 10);
    for (word = strtok(rest, " "); word; word = strtok(NULL, " ")) read_tensor(word, &tensors[count++]);
    used = edgert__request_parts(parts, head, &frame, tensors, count);
    used = edgert__share(client, parts, used, &frame);
    printf("{\"hex\": \"");
    for (i = 0; i < used; i++) {
        const unsigned char *part = (const unsigned char *)parts[i].iov_base;
        size_t k;
        for (k = 0; k < parts[i].iov_len; k++) printf("%02x", part[k]);
    }
    printf("\", \"memory\": ");
    print_hex(client->shared + 64, client->shared ? frame.body_bytes : 0);
    printf("}");
    for (i = 0; i < count; i++) free((void *)(uintptr_t)tensors[i].data);
}

static void hello(const char *name, int shared, int session) {
    unsigned char frame[64 + EDGERT__HELLO_BYTES_MAX];
    printf("{\"hex\": ");
    print_hex(frame, edgert__hello(frame, name, shared, session));
    printf("}");
}

int main(void) {
    static char line[8 * 1024 * 1024];
    static unsigned char memory[8192];
    static edgert_client alone, sharing;
    sharing.shared = memory;
    sharing.half = sizeof memory / 2;
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "decode ", 7)) decode(line + 7);
        else if (!strncmp(line, "welcome ", 8)) welcome(line + 8);
        else if (!strncmp(line, "hello ", 6)) hello(line + 6, 0, 0);
        else if (!strncmp(line, "hello-shared ", 13)) hello(line + 13, 1, 0);
        else if (!strncmp(line, "hello-session ", 14)) hello(line + 14, 0, 1);
        else if (!strncmp(line, "share ", 6)) request(EDGERT__INFER, line + 6, &sharing);
        else if (!strncmp(line, "infer ", 6)) request(EDGERT__INFER, line + 6, &alone);
        else if (!strncmp(line, "ping ", 5)) request(EDGERT__PING, line + 5, &alone);
        else return 2;
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
