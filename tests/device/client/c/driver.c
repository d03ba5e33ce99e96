/* edgert.h against a daemon, driven by tests/device/client/test_c_client.py: commands on stdin, a line of JSON each on stdout.
 *
 *   driver SOCKET MODEL TIMEOUT_MS            one client; `infer`, `describe`, `ping`
 *   driver SOCKET MODEL TIMEOUT_MS session    the same, as a session
 *   driver SOCKET MODEL TIMEOUT_MS THREADS    a client a thread, all asking without pause; `count`, `stop`
 */
#define EDGERT_IMPLEMENTATION
#include "edgert.h"

#include <inttypes.h>
#include <pthread.h>

enum { RELEASES = 16, ERRORS = 64, ITEM = 4 };

static const char *socket_path, *model_name;
static uint32_t timeout_ms;

static void print_error(const edgert_error *error) {
    const char *at;
    printf("{\"code\": \"%s\", \"number\": %d, \"retryable\": %d, \"retry_after_ms\": %" PRIu32 ", \"message\": \"",
           edgert_code_name(error->code), error->code, error->retryable, error->retry_after_ms);
    for (at = error->message; *at; at++) printf(*at == '"' || *at == '\\' ? "\\%c" : "%c", *at);
    printf("\"}");
}

static void print_response(const edgert_response *response) {
    size_t i, k, aligned = 1;
    printf("{\"release\": %" PRId64 ", \"batch\": %" PRIu32 ", \"cache_hit\": %d, \"engine_us\": %" PRIu32
           ", \"outputs\": {",
           response->release, response->batch, response->cache_hit, response->stage_us[4]);
    for (i = 0; i < response->output_count; i++) {
        const edgert_tensor *output = &response->outputs[i];
        const float *values = (const float *)output->data;
        if ((uintptr_t)output->data % 64) aligned = 0;
        if (output->datatype != EDGERT_FP32) exit(3);
        printf("%s\"%s\": {\"shape\": [", i ? ", " : "", output->name);
        for (k = 0; k < (size_t)output->rank; k++) printf("%s%" PRIu32, k ? ", " : "", output->shape[k]);
        printf("], \"bytes\": %lu, \"values\": [", (unsigned long)output->bytes);
        for (k = 0; k < output->bytes / 4 && k < 16; k++) printf("%s%.9g", k ? ", " : "", (double)values[k]);
        printf("]}");
    }
    printf("}, \"aligned\": %lu}", (unsigned long)aligned);
}

/* infer TIMEOUT_MS NO_CACHE RANK DIM... START: values START, START + 1, ... */
static void infer(edgert_client *client, char *rest) {
    uint32_t shape[EDGERT_RANK_MAX] = {0};
    edgert_options options = {0, 0, 1};
    edgert_tensor input;
    edgert_response response;
    edgert_error error;
    float *values, start;
    int rank, i;
    size_t count;
    options.timeout_ms = (uint32_t)strtoul(rest, &rest, 10);
    options.no_cache = (int)strtol(rest, &rest, 10);
    rank = (int)strtol(rest, &rest, 10);
    for (i = 0; i < rank; i++) shape[i] = (uint32_t)strtoul(rest, &rest, 10);
    start = (float)strtod(rest, &rest);
    if (edgert_tensor_set(&input, EDGERT_FP32, shape, rank, NULL)) exit(3);
    values = (float *)malloc(input.bytes + 1);
    for (count = 0; count < input.bytes / 4; count++) values[count] = start + (float)count;
    input.data = values;
    if (edgert_infer(client, &input, 1, &options, &response, &error)) print_error(&error);
    else print_response(&response);
    free(values);
}

static void describe(const edgert_client *client) {
    const edgert_model *model = edgert_describe(client);
    printf("{\"model\": \"%s\", \"release\": %" PRId64 ", \"engine\": \"%s\", \"frame_bytes_max\": %" PRIu64
           ", \"input\": \"%s\", \"datatype\": \"%s\", \"shape\": [%" PRId64 ", %" PRId64 "], \"output\": \"%s\"}",
           model->name, model->release, model->engine, model->frame_bytes_max, model->inputs[0].name,
           edgert_datatype_name(model->inputs[0].datatype), model->inputs[0].shape[0], model->inputs[0].shape[1],
           model->outputs[0].name);
}

static int one_client(int session) {
    char line[4096];
    edgert_error error;
    edgert_client *client = (session ? edgert_session : edgert_connect)(socket_path, model_name, timeout_ms, &error);
    if (client) printf("{\"connected\": true}\n");
    else {
        print_error(&error);
        printf("\n");
    }
    fflush(stdout);
    while (client && fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "infer ", 6)) infer(client, line + 6);
        else if (!strncmp(line, "describe", 8)) describe(client);
        else if (edgert_ping(client, 0, &error)) print_error(&error);
        else printf("{\"alive\": true}");
        printf("\n");
        fflush(stdout);
    }
    edgert_close(client);
    return client ? 0 : 1;
}

/* What all threads found; under `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long answers, releases[RELEASES], error_count;
static edgert_error errors[ERRORS];
static int stopping;

static int note(const edgert_response *response, const edgert_error *error) {
    int stop;
    pthread_mutex_lock(&lock);
    if (response) {
        answers++;
        releases[response->release % RELEASES]++;
    } else if (error_count++ < ERRORS) {
        errors[error_count - 1] = *error;
    }
    stop = stopping;
    pthread_mutex_unlock(&lock);
    return stop;
}

/* Asks for answers that only this thread's inputs have; a wrong one ends the program. */
static void *ask(void *argument) {
    const uint32_t shape[] = {1, ITEM};
    float values[ITEM] = {1, 2, 3, (float)(uintptr_t)argument};
    edgert_options options = {0, 1, 0};
    edgert_client *client = NULL;
    edgert_tensor input;
    edgert_response response;
    edgert_error error;
    int stop = 0;
    (void)edgert_tensor_set(&input, EDGERT_FP32, shape, 2, values);
    while (!stop) {
        if (!client && !(client = edgert_connect(socket_path, model_name, timeout_ms, &error))) {
            stop = note(NULL, &error);
        } else if (edgert_infer(client, &input, 1, &options, &response, &error)) {
            stop = note(NULL, &error);
        } else {
            const edgert_tensor *output = &response.outputs[0];
            if (output->bytes != sizeof values || memcmp(output->data, values, sizeof values)) exit(4);
            stop = note(&response, NULL);
        }
        values[0] += 1;
    }
    edgert_close(client);
    return NULL;
}

static int many_clients(int threads) {
    pthread_t pool[64];
    char line[64];
    unsigned long k;
    int i;
    for (i = 0; i < threads; i++)
        if (pthread_create(&pool[i], NULL, ask, (void *)(uintptr_t)i)) return 3;
    while (fgets(line, sizeof line, stdin) && !strncmp(line, "count", 5)) {
        pthread_mutex_lock(&lock);
        for (i = 0, k = 0; i < RELEASES; i++) k += releases[i] > 0;
        printf("{\"answers\": %lu, \"releases\": %lu, \"errors\": %lu}\n", answers, k, error_count);
        pthread_mutex_unlock(&lock);
        fflush(stdout);
    }
    pthread_mutex_lock(&lock);
    stopping = 1;
    pthread_mutex_unlock(&lock);
    for (i = 0; i < threads; i++) pthread_join(pool[i], NULL);
    printf("{\"answers\": %lu, \"releases\": {", answers);
    for (i = 0, k = 0; i < RELEASES; i++)
        if (releases[i]) printf("%s\"%d\": %lu", k++ ? ", " : "", i, releases[i]);
    printf("}, \"errors\": [");
    for (k = 0; k < error_count && k < ERRORS; k++) {
        printf("%s", k ? ", " : "");
        print_error(&errors[k]);
    }
    printf("]}\n");
    return 0;
}

int main(int argc, char **argv) {
    int threads = argc > 4 ? atoi(argv[4]) : 0;
    if (argc < 4 || threads > 64) return 2;
    socket_path = argv[1];
    model_name = argv[2];
    timeout_ms = (uint32_t)strtoul(argv[3], NULL, 10);
    return threads ? many_clients(threads) : one_client(argc > 4);
}
