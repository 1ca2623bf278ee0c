/* snapshot.c - the whole state as JSON, in one consistent moment; what tests assert on and people
 * look at. */
#include "server.h"

static void write_channel(FILE *out, const struct channel *c, const char *comma)
{
	const struct emu_channel *b = c->slot;

	fprintf(out,
	        "%s{\"gpu\":%u,\"h_client\":%u,\"h_channel\":%u,\"cid\":%u,\"tsg\":%u,\"engine\":%u,"
	        "\"scheduled\":%s,"
	        "\"disabled\":%s,\"reset\":%s,\"granted\":%s,\"pending\":%u,\"active\":%u,"
	        "\"launches\":%llu,"
	        "\"busy_ns\":%llu,\"revoked_ns\":%llu,\"stopped_ns\":%llu,\"pid\":%d,\"slice_us\":%llu,"
	        "\"uvm\":%s}",
	        comma, c->tsg->gpu->index, c->object->client->handle, c->object->handle, c->cid, c->tsg->id,
	        load(&b->engine), c->scheduled ? "true" : "false", c->disabled ? "true" : "false",
	        c->reset ? "true" : "false", load(&b->grant) ? "true" : "false", load(&b->pending),
	        load(&b->active), (unsigned long long)load(&b->launches),
	        (unsigned long long)load(&b->busy_ns), (unsigned long long)b->revoked_ns,
	        (unsigned long long)load(&b->stopped_ns), c->pid, (unsigned long long)c->tsg->slice_us,
	        c->uvm_registered ? "true" : "false");
}

static void write_gpus(FILE *out)
{
	for (uint32_t i = 0; i < S.gpus; i++) {
		const struct emu_gpu *b = S.gpu[i].board;

		fprintf(out,
		        "%s{\"index\":%u,\"gpu_id\":%u,\"minor\":%u,\"lost\":%s,\"total_bytes\":%"
		        "llu,\"used_bytes\":%llu,"
		        "\"name\":\"%s\",\"uuid\":\"GPU-",
		        i ? "," : "", i, b->gpu_id, b->minor, load(&b->lost) ? "true" : "false",
		        (unsigned long long)b->total_bytes, (unsigned long long)b->used_bytes, b->name);
		for (int k = 0; k < 16; k++)
			fprintf(out, k == 4 || k == 6 || k == 8 || k == 10 ? "-%02x" : "%02x", b->uuid[k]);
		fputs("\"}", out);
	}
}

static void write_channels(FILE *out)
{
	const char *comma = "";
	struct channel *c;
	struct tsg *t;

	for (uint32_t i = 0; i < S.gpus; i++)
		TAILQ_FOREACH(t, &S.gpu[i].tsgs, link)
			TAILQ_FOREACH(c, &t->channels, link) {
				write_channel(out, c, comma);
				comma = ",";
			}
}

static void write_clients(FILE *out)
{
	const char *comma = "";
	struct client *c;
	struct object *o;

	TAILQ_FOREACH(c, &S.clients, link) {
		uint32_t objects = 0;

		TAILQ_FOREACH(o, &c->objects, in_client)
			objects++;
		fprintf(out, "%s{\"handle\":%u,\"pid\":%d,\"file\":%llu,\"objects\":%u}", comma, c->handle,
		        c->pid, (unsigned long long)c->file->id, objects);
		comma = ",";
	}
}

static void write_memory(FILE *out)
{
	const char *comma = "";
	struct client *c;
	struct object *o;

	TAILQ_FOREACH(c, &S.clients, link)
		TAILQ_FOREACH(o, &c->objects, in_client) {
			const struct memory *m = o->memory;

			if (!m)
				continue;
			fprintf(out,
			        "%s{\"hClient\":%u,\"hMemory\":%u,\"serial\":%u,\"bytes\":%llu,\"refs\":%u,"
			        "\"gpu\":%d,\"pid\":%d}",
			        comma, c->handle, o->handle, m->serial, (unsigned long long)m->size, m->refs,
			        m->gpu ? (int)m->gpu->index : -1, c->pid);
			comma = ",";
		}
}

static void write_files(FILE *out)
{
	static const char *const kinds[] = {"", "ctl", "node", "uvm"};
	const char *comma = "";
	struct file *f;

	TAILQ_FOREACH(f, &S.files, link) {
		fprintf(out, "%s{\"id\":%llu,\"kind\":\"%s\",\"minor\":%u,\"pid\":%d,\"exports\":%u}", comma,
		        (unsigned long long)f->id, kinds[f->kind], f->minor, f->pid,
		        f->exports && f->exports[0] ? f->exports[0]->serial : 0);
		comma = ",";
	}
}

void snapshot_json(FILE *out)
{
	state_lock();
	fprintf(out,
	        "{\"driver\":\"%s\",\"seed\":%llu,\"now_ns\":%llu,\"held\":%u,\"mmu_faults\":%llu,\"knobs\":",
	        S.driver, (unsigned long long)S.seed, (unsigned long long)now_ns(), faults_held(),
	        (unsigned long long)S.mmu_faults);
	knobs_write(out);
	fputs(",\"gpus\":[", out);
	write_gpus(out);
	fputs("],\"api_lock\":", out);
	locks_write(out);
	fputs(",\"channels\":[", out);
	write_channels(out);
	fputs("],\"clients\":[", out);
	write_clients(out);
	fputs("],\"memory\":[", out);
	write_memory(out);
	fputs("],\"files\":[", out);
	write_files(out);
	fputs("],", out);
	journal_write(out);
	state_unlock();
	fputs("}\n", out);
}

/* Per card the processes that hold channels on it, with the memory they allocated there. */
void snapshot_procs(FILE *out)
{
	struct client *c;
	struct object *o;

	LOCKED(&S.state);
	TAILQ_FOREACH(c, &S.clients, link) {
		uint64_t bytes[EMU_GPUS] = {0};
		bool channels[EMU_GPUS] = {false};

		TAILQ_FOREACH(o, &c->objects, in_client) {
			if (o->memory && o->memory->gpu)
				bytes[o->memory->gpu->index] += o->memory->size;
			if (o->channel)
				channels[o->gpu->index] = true;
		}
		for (uint32_t i = 0; i < S.gpus; i++)
			if (channels[i])
				fprintf(out, "%u %d %llu\n", i, c->pid, (unsigned long long)bytes[i]);
	}
}
