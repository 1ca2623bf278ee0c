/*
 * kvthreads.c - the shim's memory threads against each other, for the thread sanitizer: applications that allocate, ask, step
 * and free; a "session" that hands in orders, sound and stale; a valved that is replaced now and then; and a driver that
 * fails at random (kvdriver.h). At the end nothing is held and nobody waits. Usage: kvthreads MILLISECONDS SEED
 */
#include "kvdriver.h"

#include "contexts.h"

#define APPS  3
#define KNOWN 64
#define FIRST 400 /* numbers of descriptors that orders bring; nobody else's are as high */
#define FDS   500

struct valve_shim valve_shim = {.link_generation = 1};
struct valve_contexts valve_contexts;
unsigned char valve_pages[VALVE_PAGES_BYTES] __attribute__((aligned(4096)));
_Thread_local struct valve_tls valve_tls;

void valve_kv_begin(uint32_t flags);
void valve_kv_end(void);
void valve_kv_step(void);

static uint32_t known[KNOWN]; /* ranges that valved was told of */
static uint32_t answers, taken = 1, ended, stopped;
static uint32_t bringer[FDS]; /* the last order that brought this descriptor */
static struct valve_entry plain_alloc, plain_free;

static int number_of(uint64_t order)
{
	return FIRST + (int)(order % FDS);
}

/* ---- what link.c, say.c and interpose.c would provide ---- */

void valve_say(const char *text)
{
	(void)text;
}

void valve_note(uint32_t code, uint32_t a, uint32_t b, const char *text)
{
	(void)code, (void)a, (void)b, (void)text;
}

const volatile struct valve_kv_free *valve_kv_free_of(const uint8_t *gpu_uuid)
{
	(void)gpu_uuid;
	return NULL;
}

int valve_spawn(void *(*run)(void *), size_t most)
{
	pthread_t thread;

	(void)most;
	return -pthread_create(&thread, NULL, run, NULL) ?: -pthread_detach(thread);
}

int valve_link_send_fds(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                        uint32_t generation)
{
	const struct valve_link_kv_done *done = message;
	int err = -ENOTCONN;

	(void)bytes, (void)fds;
	valve_lock(&valve_shim.link_lock);
	if (generation == load_relaxed(&valve_shim.link_generation))
		err = 0;
	valve_unlock(&valve_shim.link_lock);
	if (!err && type == VALVE_LINK_KV_DONE) {
		CHECK(done->done <= VALVE_KV_ENTRIES && count <= done->done);
		/* Its descriptors are closed by now: valved may send as many again at once. */
		CHECK(load_acquire(&bringer[done->order % FDS]) != done->order ||
		      fcntl(number_of(done->order), F_GETFD) < 0);
		add_full(&answers, 1);
	}
	return err;
}

int valve_link_send(void *message, uint32_t bytes, uint16_t type, int fd)
{
	return valve_link_send_fds(message, bytes, type, &fd, fd >= 0,
	                           load_acquire(&valve_shim.link_generation));
}

/* The kernel passes everything here. */
int valve_link_lend(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                    uint32_t generation)
{
	(void)message, (void)bytes, (void)type, (void)fds, (void)count, (void)generation;
	return -EAGAIN;
}

/* valved answers a new range at once, and sends orders for it from then on. */
int valve_link_request_fds(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                           int timeout_ms, const uint32_t *progress)
{
	const struct valve_link_kv_range *range = message;

	(void)bytes, (void)fds, (void)count, (void)timeout_ms, (void)progress;
	if (type == VALVE_LINK_KV_RANGE)
		store_release(&known[range->range % KNOWN], range->range);
	return 0;
}

int valve_capture_uvm_fd(void)
{
	return -1;
}

/* ---- the actors ---- */

static CUresult allocate_plainly(uintptr_t out, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                                 uintptr_t a5)
{
	(void)a1, (void)a2, (void)a3, (void)a4, (void)a5;
	*(CUdeviceptr *)out = 0x1000;
	return CUDA_SUCCESS;
}

static CUresult free_plainly(uintptr_t at, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                             uintptr_t a5)
{
	(void)a1, (void)a2, (void)a3, (void)a4, (void)a5;
	return at == 0x1000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void *application(void *unused)
{
	(void)unused;
	while (!load_acquire(&stopped)) {
		CUdeviceptr at = 0, base = 0;
		size_t bytes = 0;

		valve_kv_begin(VALVE_KV_ELASTIC);
		CHECK(!valve_on_cuMemAlloc((uintptr_t)&at, 20 * H, 0, 0, 0, 0, &plain_alloc));
		valve_kv_end();
		for (int i = 0; i < 20 && at != 0x1000; i++) {
			CHECK(!valve_on_cuMemGetAddressRange((uintptr_t)&base, (uintptr_t)&bytes, at + 3 * H,
			                                     0, 0, 0, &plain_alloc));
			CHECK(base == at && bytes == 20 * H);
			valve_kv_step();
			sleep_ns(100000);
		}
		CHECK(!valve_on_cuMemFree(at, 0, 0, 0, 0, 0, &plain_free));
	}
	add_full(&ended, 1);
	return NULL;
}

/* The process had no room for the rest of what this order brought. */
static bool bring(struct valve_fds *fds)
{
	int number = number_of(taken);

	if (fcntl(number, F_GETFD) >= 0) /* an order that still waits has it */
		return false;
	CHECK(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, number) == number);
	*fds = (struct valve_fds){.count = 1, .at = {number}, .cut = true};
	store_release(&bringer[taken % FDS], taken);
	return true;
}

static void hand_in(void)
{
	struct valve_link_kv_entries packet = {.order = taken,
	                                       .range = load_acquire(&known[draw() % KNOWN]),
	                                       .op = (uint16_t)(VALVE_KV_BACK + draw() % 3),
	                                       .how = draw() % 8 == 0 ? VALVE_KV_AT_STEP : VALVE_KV_AT_ONCE,
	                                       .count = (uint32_t)(draw() % 20)};
	struct valve_fds fds = {.count = 0};

	if (packet.op == VALVE_KV_QUARANTINE && draw() % 2)
		packet.how = VALVE_KV_OUTSIDE;
	packet.header = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC, .type = VALVE_LINK_KV_ORDER, .length = sizeof(packet)};
	bool creates = packet.op == VALVE_KV_BACK && (!packet.count || draw() % 4 || !bring(&fds));
	for (uint32_t i = 0, slot = (uint32_t)(draw() % 20); i < packet.count; i++)
		packet.entry[i] = (struct valve_kv_entry){
		        .handle = i,
		        .slot = (slot + i) % 20,
		        .flags = creates ? VALVE_KV_CREATE | (draw() % 2 ? VALVE_KV_ZERO : 0) : 0};
	CHECK(!valve_orders_take(&packet.header, sizeof(packet), &fds));
	taken++;
}

/* One order for several ranges, some of which may be gone. Ranges have 20 slots. */
static void hand_in_runs(void)
{
	struct valve_link_kv_runs packet = {.order = taken,
	                                    .op = (uint16_t)(VALVE_KV_BACK + draw() % 3),
	                                    .how = draw() % 8 == 0 ? VALVE_KV_AT_STEP : VALVE_KV_AT_ONCE,
	                                    .count = 1 + (uint32_t)(draw() % 6)};
	struct valve_fds fds = {.count = 0};
	uint32_t first = (uint32_t)(draw() % KNOWN);

	if (packet.op == VALVE_KV_QUARANTINE && draw() % 2)
		packet.how = VALVE_KV_OUTSIDE;
	packet.header = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC, .type = VALVE_LINK_KV_RUNS, .length = sizeof(packet)};
	for (uint32_t i = 0; i < packet.count; i++)
		packet.run[i] = (struct valve_kv_run){
		        .handle = 100 * i,
		        .range = load_acquire(&known[(first + i / 2) % KNOWN]),
		        .slot = i % 2 * 10 + (uint32_t)(draw() % 5),
		        .count = 1 + (uint32_t)(draw() % 5),
		        .flags = packet.op == VALVE_KV_BACK
		                         ? VALVE_KV_CREATE | (draw() % 2 ? VALVE_KV_ZERO : 0)
		                         : 0};
	/* Places that nobody has taken yet name the same range, and no order names a slot twice. */
	for (uint32_t i = 2; i < packet.count; i++)
		for (uint32_t j = 0; j < i / 2 * 2 && i < packet.count; j++)
			if (packet.run[i].range == packet.run[j].range)
				packet.count = i / 2 * 2;
	CHECK(!valve_orders_take_runs(&packet.header, sizeof(packet), &fds));
	taken++;
}

static void *session(void *unused)
{
	(void)unused;
	while (load_acquire(&ended) < APPS) {
		if (draw() % 2)
			hand_in();
		else
			hand_in_runs();
		if (draw() % 100 == 0) { /* another valved */
			valve_lock(&valve_shim.link_lock);
			store_release(&valve_shim.link_generation, valve_shim.link_generation + 1);
			valve_unlock(&valve_shim.link_lock);
			valve_orders_wake();
		}
		sleep_ns(50000 + draw() % 100000);
	}
	return NULL;
}

static bool is_quiet(void)
{
	for (uint64_t i = 1; i <= gpu.next_handle; i++)
		if (gpu.mappings[i])
			return false;
	return true;
}

int main(int argc, char **argv)
{
	struct valve_control *control = (struct valve_control *)(void *)VALVE_CONTROL_PAGE;
	pthread_t team[APPS], reader;

	gpu.random = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
	control->kv_handle_bytes = H;
	valve_shim.state = VALVE_STATE_LINKED;
	valve_shim.role = VALVE_ROLE_ONLINE;
	valve_shim.daemon_features = VALVE_FEATURE_MEMORY;
	plain_alloc.target = (void *)(uintptr_t)allocate_plainly;
	plain_free.target = (void *)(uintptr_t)free_plainly;
	for (int i = 0; i < APPS; i++)
		pthread_create(&team[i], NULL, application, NULL);
	pthread_create(&reader, NULL, session, NULL);
	sleep_ns((uint64_t)(argc > 1 ? atoi(argv[1]) : 500) * 1000000u);
	store_release(&stopped, 1);
	for (int i = 0; i < APPS; i++)
		pthread_join(team[i], NULL);
	pthread_join(reader, NULL);
	pthread_mutex_lock(&gpu.lock);
	CHECK(is_quiet());
	pthread_mutex_unlock(&gpu.lock);
	fprintf(stderr, "%u orders, %u answers, %llu handles\n", taken, load_acquire(&answers),
	        (unsigned long long)gpu.next_handle);
	puts("nothing is mapped and nobody waits");
	return 0;
}
