SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.edgert_device (
    id bigint NOT NULL,
    site character varying(64) NOT NULL,
    device character varying(64) NOT NULL,
    profile character varying(64) NOT NULL,
    status character varying(16) NOT NULL,
    heard_ms bigint NOT NULL,
    info text,
    sys text,
    deploy text
);
CREATE SEQUENCE public.edgert_device_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.edgert_device_id_seq OWNED BY public.edgert_device.id;
CREATE TABLE public.edgert_event (
    device_id bigint NOT NULL,
    boot character varying(64) NOT NULL,
    seq bigint NOT NULL,
    at_ms bigint NOT NULL,
    event character varying(64) NOT NULL,
    model character varying(64),
    fields text NOT NULL
);
CREATE TABLE public.edgert_forgotten (
    turns bigint NOT NULL
);
CREATE TABLE public.edgert_group (
    id bigint NOT NULL,
    site character varying(64) NOT NULL,
    model character varying(64) NOT NULL,
    version character varying(64) NOT NULL,
    profile character varying(64) NOT NULL
);
CREATE TABLE public.edgert_group_heard (
    owner bigint NOT NULL,
    hour integer NOT NULL
);
CREATE TABLE public.edgert_group_hour (
    slot integer NOT NULL,
    owner bigint NOT NULL,
    windows bigint NOT NULL,
    zero bigint NOT NULL,
    count bigint NOT NULL,
    sum double precision NOT NULL,
    "least" double precision NOT NULL,
    most double precision NOT NULL,
    buckets bytea NOT NULL,
    requests bigint NOT NULL,
    errors bigint NOT NULL,
    shed bigint NOT NULL,
    cache_hits bigint NOT NULL
);
CREATE SEQUENCE public.edgert_group_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.edgert_group_id_seq OWNED BY public.edgert_group.id;
CREATE TABLE public.edgert_group_minute (
    slot integer NOT NULL,
    owner bigint NOT NULL,
    windows bigint NOT NULL,
    zero bigint NOT NULL,
    count bigint NOT NULL,
    sum double precision NOT NULL,
    "least" double precision NOT NULL,
    most double precision NOT NULL,
    buckets bytea NOT NULL,
    requests bigint NOT NULL,
    errors bigint NOT NULL,
    shed bigint NOT NULL,
    cache_hits bigint NOT NULL
);
CREATE TABLE public.edgert_hist_window (
    stream bigint NOT NULL,
    seq bigint NOT NULL,
    minute integer NOT NULL,
    ts_ms bigint NOT NULL,
    windows bigint NOT NULL,
    zero bigint NOT NULL,
    count bigint NOT NULL,
    sum double precision NOT NULL,
    "least" double precision NOT NULL,
    most double precision NOT NULL,
    buckets bytea NOT NULL
);
CREATE TABLE public.edgert_meta (
    version integer NOT NULL
);
CREATE TABLE public.edgert_metrics_window (
    stream bigint NOT NULL,
    seq bigint NOT NULL,
    minute integer NOT NULL,
    ts_ms bigint NOT NULL,
    requests bigint NOT NULL,
    errors bigint NOT NULL,
    shed bigint NOT NULL,
    cache_hits bigint NOT NULL,
    fields bytea NOT NULL
);
CREATE TABLE public.edgert_stream (
    id bigint NOT NULL,
    device_id bigint NOT NULL,
    boot character varying(64) NOT NULL,
    model character varying(64) NOT NULL,
    version character varying(64) NOT NULL,
    last_seq bigint NOT NULL,
    requests bigint NOT NULL,
    errors bigint NOT NULL,
    shed bigint NOT NULL,
    cache_hits bigint NOT NULL
);
CREATE TABLE public.edgert_stream_heard (
    owner bigint NOT NULL,
    hour integer NOT NULL
);
CREATE TABLE public.edgert_stream_hour (
    slot integer NOT NULL,
    owner bigint NOT NULL,
    windows bigint NOT NULL,
    zero bigint NOT NULL,
    count bigint NOT NULL,
    sum double precision NOT NULL,
    "least" double precision NOT NULL,
    most double precision NOT NULL,
    buckets bytea NOT NULL,
    requests bigint NOT NULL,
    errors bigint NOT NULL,
    shed bigint NOT NULL,
    cache_hits bigint NOT NULL
);
CREATE SEQUENCE public.edgert_stream_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.edgert_stream_id_seq OWNED BY public.edgert_stream.id;
ALTER TABLE ONLY public.edgert_device ALTER COLUMN id SET DEFAULT nextval('public.edgert_device_id_seq'::regclass);
ALTER TABLE ONLY public.edgert_group ALTER COLUMN id SET DEFAULT nextval('public.edgert_group_id_seq'::regclass);
ALTER TABLE ONLY public.edgert_stream ALTER COLUMN id SET DEFAULT nextval('public.edgert_stream_id_seq'::regclass);
INSERT INTO public.edgert_device VALUES (1, 'plant-a', 'pi-1', 'pi', 'online', 1790000400000, '{"v": 1, "ts": 1790000400000, "boot": "b1", "profile": "pi"}', NULL, NULL);
INSERT INTO public.edgert_device VALUES (2, 'plant-a', 'pi-2', 'pi', 'online', 1790000400000, '{"v": 1, "ts": 1790000400000, "boot": "b1", "profile": "pi"}', NULL, NULL);
INSERT INTO public.edgert_event VALUES (1, 'b1', 1, 1790000340000, 'serving', 'digits', '{"v": 1, "ts": 1790000340000, "boot": "b1", "seq": 1, "event": "serving", "model": "digits"}');
INSERT INTO public.edgert_forgotten VALUES (0);
INSERT INTO public.edgert_group VALUES (1, 'plant-a', 'digits', 'r1', 'pi');
INSERT INTO public.edgert_group_heard VALUES (1, 497222);
INSERT INTO public.edgert_group_hour VALUES (497222, 1, 10, 0, 30, 120, 1, 9, '\xffff0a000000000000001f000a0000000000000065000a00000000000000', 40, 10, 0, 0);
INSERT INTO public.edgert_group_minute VALUES (29833335, 1, 2, 0, 6, 24, 1, 9, '\xffff02000000000000001f00020000000000000065000200000000000000', 8, 2, 0, 0);
INSERT INTO public.edgert_group_minute VALUES (29833336, 1, 1, 0, 3, 12, 1, 9, '\xffff01000000000000001f00010000000000000065000100000000000000', 4, 1, 0, 0);
INSERT INTO public.edgert_group_minute VALUES (29833337, 1, 1, 0, 3, 12, 1, 9, '\xffff01000000000000001f00010000000000000065000100000000000000', 4, 1, 0, 0);
INSERT INTO public.edgert_group_minute VALUES (29833338, 1, 2, 0, 6, 24, 1, 9, '\xffff02000000000000001f00020000000000000065000200000000000000', 16, 4, 0, 0);
INSERT INTO public.edgert_group_minute VALUES (29833339, 1, 2, 0, 6, 24, 1, 9, '\xffff02000000000000001f00020000000000000065000200000000000000', 8, 2, 0, 0);
INSERT INTO public.edgert_group_minute VALUES (29833334, 1, 2, 0, 6, 24, 1, 9, '\xffff02000000000000001f00020000000000000065000200000000000000', 0, 0, 0, 0);
INSERT INTO public.edgert_hist_window VALUES (1, 1, 29833334, 1790000040000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (1, 2, 29833335, 1790000100000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (1, 3, 29833336, 1790000160000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (1, 4, 29833337, 1790000220000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (1, 5, 29833338, 1790000280000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (1, 6, 29833339, 1790000340000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (2, 1, 29833334, 1790000040000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (2, 2, 29833335, 1790000100000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (2, 5, 29833338, 1790000280000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_hist_window VALUES (2, 6, 29833339, 1790000340000, 1, 0, 3, 12, 1, 9, '\xffff010000001f0001000000650001000000');
INSERT INTO public.edgert_meta VALUES (1);
INSERT INTO public.edgert_metrics_window VALUES (1, 1, 29833334, 1790000040000, 0, 0, 0, 0, '\x78bb8220da17ab864a4094591a80800988401862a80435d710d33e0cf3408a911c6d82e221430cdf620b1084ff0cc1ce015b04f67b2d00447d3431');
INSERT INTO public.edgert_metrics_window VALUES (2, 1, 29833334, 1790000040000, 0, 0, 0, 0, '\x78bb8220da17ab864a4094591a80800988401862a80435d710d33e0cf3408a911c6d82e221430cdf620b1084ff0cc1ce015b04f67b2d00447d3431');
INSERT INTO public.edgert_metrics_window VALUES (1, 2, 29833335, 1790000100000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1001499060608430c95a0e61a61da87611e483192a32d503c6484e15b6c0182f01fc425608bc07eaf050044af3434');
INSERT INTO public.edgert_metrics_window VALUES (1, 3, 29833336, 1790000160000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1c0d00c44220c3154829a6b8c691f867920c5488e363442f191318677b18508c283a07405047a0650cfd7020071ed3467');
INSERT INTO public.edgert_metrics_window VALUES (1, 4, 29833337, 1790000220000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1c0c80844220c3154829a6b82691f867920c5488e363443f191098677b18508c283a07405047a0650cfd70200721d346a');
INSERT INTO public.edgert_metrics_window VALUES (1, 5, 29833338, 1790000280000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1c0c80244220c3154829a6b8a691f867920c5488e3642f591298677b18508c283a07405047a0650cfd7020074f9346d');
INSERT INTO public.edgert_metrics_window VALUES (1, 6, 29833339, 1790000340000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1c0d80444220c3154829a6b86691f867920c5488e363241f191198677b18508c283a07405047a0650cfd7020075293470');
INSERT INTO public.edgert_metrics_window VALUES (2, 2, 29833335, 1790000100000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1001499060608430c95a0e61a61da87611e483192a32d503c6484e15b6c0182f01fc425608bc07eaf050044af3434');
INSERT INTO public.edgert_metrics_window VALUES (2, 5, 29833338, 1790000280000, 12, 3, 0, 0, '\x78bb8220da17ab864a40945902e3d1c0c80244220c3154829a6b8a691f867920c5488e3642f591298677b18508c283a07405047a0650cfd7020074f9346d');
INSERT INTO public.edgert_metrics_window VALUES (2, 6, 29833339, 1790000340000, 4, 1, 0, 0, '\x78bb8220da17ab864a40945902e3d1c0d80444220c3154829a6b86691f867920c5488e363241f191198677b18508c283a07405047a0650cfd7020075293470');
INSERT INTO public.edgert_stream VALUES (1, 1, 'b1', 'digits', 'r1', 6, 24, 6, 0, 0);
INSERT INTO public.edgert_stream VALUES (2, 2, 'b1', 'digits', 'r1', 6, 24, 6, 0, 0);
INSERT INTO public.edgert_stream_heard VALUES (1, 497222);
INSERT INTO public.edgert_stream_heard VALUES (2, 497222);
INSERT INTO public.edgert_stream_hour VALUES (497222, 2, 4, 0, 12, 48, 1, 9, '\xffff04000000000000001f00040000000000000065000400000000000000', 20, 5, 0, 0);
INSERT INTO public.edgert_stream_hour VALUES (497222, 1, 6, 0, 18, 72, 1, 9, '\xffff06000000000000001f00060000000000000065000600000000000000', 20, 5, 0, 0);
SELECT pg_catalog.setval('public.edgert_device_id_seq', 2, true);
SELECT pg_catalog.setval('public.edgert_group_id_seq', 1, true);
SELECT pg_catalog.setval('public.edgert_stream_id_seq', 2, true);
ALTER TABLE ONLY public.edgert_device
    ADD CONSTRAINT edgert_device_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.edgert_device
    ADD CONSTRAINT edgert_device_site_device_key UNIQUE (site, device);
ALTER TABLE ONLY public.edgert_event
    ADD CONSTRAINT edgert_event_pkey PRIMARY KEY (device_id, boot, seq);
ALTER TABLE ONLY public.edgert_group_heard
    ADD CONSTRAINT edgert_group_heard_pkey PRIMARY KEY (owner);
ALTER TABLE ONLY public.edgert_group_hour
    ADD CONSTRAINT edgert_group_hour_pkey PRIMARY KEY (slot, owner);
ALTER TABLE ONLY public.edgert_group_minute
    ADD CONSTRAINT edgert_group_minute_pkey PRIMARY KEY (slot, owner);
ALTER TABLE ONLY public.edgert_group
    ADD CONSTRAINT edgert_group_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.edgert_group
    ADD CONSTRAINT edgert_group_site_model_version_profile_key UNIQUE (site, model, version, profile);
ALTER TABLE ONLY public.edgert_hist_window
    ADD CONSTRAINT edgert_hist_window_pkey PRIMARY KEY (stream, seq);
ALTER TABLE ONLY public.edgert_metrics_window
    ADD CONSTRAINT edgert_metrics_window_pkey PRIMARY KEY (stream, seq);
ALTER TABLE ONLY public.edgert_stream
    ADD CONSTRAINT edgert_stream_device_id_boot_model_version_key UNIQUE (device_id, boot, model, version);
ALTER TABLE ONLY public.edgert_stream_heard
    ADD CONSTRAINT edgert_stream_heard_pkey PRIMARY KEY (owner);
ALTER TABLE ONLY public.edgert_stream_hour
    ADD CONSTRAINT edgert_stream_hour_pkey PRIMARY KEY (slot, owner);
ALTER TABLE ONLY public.edgert_stream
    ADD CONSTRAINT edgert_stream_pkey PRIMARY KEY (id);
CREATE INDEX ix_edgert_event_at_ms ON public.edgert_event USING btree (at_ms);
CREATE INDEX ix_edgert_group_heard_hour ON public.edgert_group_heard USING btree (hour);
CREATE INDEX ix_edgert_hist_window_minute ON public.edgert_hist_window USING btree (minute);
CREATE INDEX ix_edgert_metrics_window_minute ON public.edgert_metrics_window USING btree (minute);
CREATE INDEX ix_edgert_stream_heard_hour ON public.edgert_stream_heard USING btree (hour);
ALTER TABLE ONLY public.edgert_event
    ADD CONSTRAINT edgert_event_device_id_fkey FOREIGN KEY (device_id) REFERENCES public.edgert_device(id);
ALTER TABLE ONLY public.edgert_group_heard
    ADD CONSTRAINT edgert_group_heard_owner_fkey FOREIGN KEY (owner) REFERENCES public.edgert_group(id);
ALTER TABLE ONLY public.edgert_hist_window
    ADD CONSTRAINT edgert_hist_window_stream_fkey FOREIGN KEY (stream) REFERENCES public.edgert_stream(id);
ALTER TABLE ONLY public.edgert_metrics_window
    ADD CONSTRAINT edgert_metrics_window_stream_fkey FOREIGN KEY (stream) REFERENCES public.edgert_stream(id);
ALTER TABLE ONLY public.edgert_stream
    ADD CONSTRAINT edgert_stream_device_id_fkey FOREIGN KEY (device_id) REFERENCES public.edgert_device(id);
ALTER TABLE ONLY public.edgert_stream_heard
    ADD CONSTRAINT edgert_stream_heard_owner_fkey FOREIGN KEY (owner) REFERENCES public.edgert_stream(id);
