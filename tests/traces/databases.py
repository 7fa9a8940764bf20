"""Small sound databases of Nsight Systems and of rocprofv3, as SQL: one GEMM and one copy in one step."""

from __future__ import annotations

NSIGHT = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INT, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, correlationId INT,
    demangledName INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT, registersPerThread INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, correlationId INT, bytes INT,
    copyKind INT, srcKind INT, dstKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
CREATE TABLE NVTX_EVENTS (start INT, end INT, globalTid INT, eventType INT, text TEXT, textId INT);
INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, 'volta_sgemm_128x64_nn'), (3, 'ProfilerStep#1'),
    (4, 'cudaMemcpyAsync_v3020');
INSERT INTO TARGET_INFO_GPU VALUES (0, 'Tesla V100-SXM2-16GB');
INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (30000, 430000, 0, 7, 11, 2, 8, 4, 1, 256, 1, 1, 128);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (500000, 600000, 0, 7, 12, 4096, 1, 1, 2);
INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (20000, 25000, 77, 11, 1), (480000, 490000, 77, 12, 4);
INSERT INTO NVTX_EVENTS VALUES (0, 1000000, 77, 59, NULL, 3), (10000, 40000, 77, 59, 'aten::mm, seq = 3', NULL);
"""

RUN = "_019a2b3c_4d5e_7f60_8123_456789abcdef"
ROCPD = """
CREATE TABLE rocpd_metadata{run} (id INTEGER PRIMARY KEY, tag TEXT, value TEXT);
CREATE TABLE rocpd_string{run} (id INTEGER PRIMARY KEY, guid TEXT, string TEXT);
CREATE TABLE rocpd_info_agent{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, type TEXT, absolute_index INT,
    name TEXT, model_name TEXT, vendor_name TEXT, product_name TEXT);
CREATE TABLE rocpd_info_kernel_symbol{run} (id INTEGER PRIMARY KEY, guid TEXT, kernel_name TEXT, display_name TEXT);
CREATE TABLE rocpd_event{run} (id INTEGER PRIMARY KEY, guid TEXT, category_id INT, stack_id INT, parent_stack_id INT,
    correlation_id INT, call_stack TEXT, line_info TEXT, extdata TEXT);
CREATE TABLE rocpd_region{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, tid INT, start BIGINT, end BIGINT,
    name_id INT, event_id INT, extdata TEXT);
CREATE TABLE rocpd_kernel_dispatch{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, tid INT, agent_id INT,
    kernel_id INT, dispatch_id INT, queue_id INT, stream_id INT, start BIGINT, end BIGINT, private_segment_size INT,
    group_segment_size INT, workgroup_size_x INT, workgroup_size_y INT, workgroup_size_z INT, grid_size_x INT,
    grid_size_y INT, grid_size_z INT, region_name_id INT, event_id INT, extdata TEXT);
CREATE TABLE rocpd_memory_copy{run} (id INTEGER PRIMARY KEY, guid TEXT, nid INT, pid INT, tid INT, start BIGINT,
    end BIGINT, name_id INT, dst_agent_id INT, dst_address INT, src_agent_id INT, src_address INT, size INT,
    queue_id INT, stream_id INT, region_name_id INT, event_id INT, extdata TEXT);
CREATE VIEW rocpd_string AS SELECT * FROM rocpd_string{run};
INSERT INTO rocpd_metadata{run} (tag, value) VALUES ('schema_version', '3');
INSERT INTO rocpd_string{run} (id, string) VALUES (1, 'HIPRUNTIME_API_EXT'), (2, 'hipLaunchKernel'),
    (3, 'HSA_CORE_API'),
    (4, 'hsa_signal_store'), (5, 'KERNEL_DISPATCH'), (6, 'MARKER_CORE_RANGE_API'), (7, 'roctxThreadRangeA'),
    (8, 'MEMORY_COPY_HOST_TO_DEVICE'), (9, 'MEMORY_COPY'), (10, 'hipMemcpyAsync');
INSERT INTO rocpd_info_agent{run} (id, type, name, product_name) VALUES (0, 'CPU', 'EPYC', 'EPYC'),
    (4, 'GPU', 'gfx942', 'AMD Instinct MI300X');
INSERT INTO rocpd_info_kernel_symbol{run} (id, kernel_name, display_name)
    VALUES (9, 'k.kd', 'Cijk_Ailk_Bljk_SB_MT128x128');
INSERT INTO rocpd_event{run} (id, category_id, stack_id, parent_stack_id, extdata) VALUES (1, 1, 11, 0, '{}'),
    (2, 3, 12, 11, '{}'), (3, 5, 12, 12, '{}'), (4, 6, 10, 0, '{"message": "ProfilerStep#1"}'),
    (5, 6, 13, 0, '{"message": "aten::mm, seq = 3"}'), (6, 1, 14, 0, '{}'), (7, 9, 14, 14, '{}');
INSERT INTO rocpd_region{run} (id, tid, start, end, name_id, event_id) VALUES (11, 77, 20000, 25000, 2, 1),
    (12, 77, 21000, 22000, 4, 2), (10, 77, 0, 1000000, 7, 4), (13, 77, 10000, 40000, 7, 5),
    (14, 77, 480000, 490000, 10, 6);
INSERT INTO rocpd_kernel_dispatch{run} (id, tid, agent_id, kernel_id, queue_id, stream_id, start, end, workgroup_size_x,
    workgroup_size_y, workgroup_size_z, grid_size_x, grid_size_y, grid_size_z, event_id)
    VALUES (1, 77, 4, 9, 2, 0, 30000, 430000, 256, 1, 1, 2048, 4, 1, 3);
INSERT INTO rocpd_memory_copy{run} (id, tid, start, end, name_id, dst_agent_id, src_agent_id, size, stream_id, event_id)
    VALUES (1, 77, 500000, 600000, 8, 4, 0, 4096, 0, 7);
"""
